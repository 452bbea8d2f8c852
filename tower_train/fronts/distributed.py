"""Training of graph-mode programs with sessions of their own on several workers, after Horovod's model."""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.program import Cluster, current
from tower_train.graph import collectives
from tower_train.graph.collectives import AllReduce, Keys
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import Gradient, GradientsAndVariables, name_of

v1 = tf.compat.v1


class DistributedOptimizer(v1.train.Optimizer):
    """An optimizer of tf.compat.v1.train whose compute_gradients gives the means over all workers.

    All else is the optimizer's own. Workers match gradients by the names of the variables, so several such optimizers
    may be in one graph. Every worker must do as many steps.

    Several towers in one worker are averaged there first:

        towers_mean = tower_train.average_gradients([sgd.compute_gradients(loss) for loss in tower_losses])
        optimizer = tower_train.DistributedOptimizer(sgd)
        train_op = optimizer.apply_gradients(optimizer.average(towers_mean))
    """

    def __init__(
        self, optimizer: v1.train.Optimizer, name: str | None = None, dtype: tf.DType | None = None,
        sparse_as_dense: bool = False, cluster: Cluster | None = None,
    ):  # fmt: skip
        """Wraps an optimizer.

        Args:
          optimizer: any of tf.compat.v1.train, such as MomentumOptimizer, or a MixedPrecisionLossScaleOptimizer, which
            may also be around this one.
          name: for its operations.
          dtype: float16 or bfloat16 to send dense gradients in it; None for their own. Those of float16 and bfloat16
            are sent as float32.
          sparse_as_dense: make IndexedSlices dense. Otherwise the rows of all workers, of any numbers, are gathered.
          cluster: the workers; by default those of tower_train.cluster.init().

        Raises:
          GraphError: not such an optimizer, or no cluster yet.
        """
        if not isinstance(optimizer, v1.train.Optimizer):
            raise errors.GraphError(
                f"DistributedOptimizer got {type(optimizer).__name__}. It needs an optimizer of tf.compat.v1.train; "
                "Keras models train on several machines with multi_gpu_model."
            )
        super().__init__(use_locking=False, name=name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._dtype, self._densify = optimizer, dtype, sparse_as_dense
        self._cluster = cluster or current()
        self._track_trackable(optimizer, "base_optimizer")

    def compute_gradients(self, *args, **kwargs) -> GradientsAndVariables:
        """Returns (mean over workers, variable) for each variable; None where the loss does not depend on it.

        Args: those of the optimizer.
        """
        return self.average(self._optimizer.compute_gradients(*args, **kwargs))

    def average(self, grads_and_vars: GradientsAndVariables) -> GradientsAndVariables:
        """Returns the means over workers of gradients as of compute_gradients."""
        return average_over_workers(grads_and_vars, self._cluster, self._dtype, self._densify)

    def apply_gradients(self, *args, **kwargs) -> tf.Operation:
        """The optimizer's own."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self) -> list[str]:
        """The optimizer's own."""
        return self._optimizer.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """The optimizer's own."""
        return self._optimizer.variables()


def average_over_workers(
    grads_and_vars: GradientsAndVariables, cluster: Cluster, dtype: tf.DType | None = None, densify: bool = False
) -> GradientsAndVariables:
    """Returns the mean over workers of each variable's gradient, in a program's own graph, and counts such means.

    Workers match gradients by the variables' names, whatever the order here. All are averaged in any step that uses
    one.

    Args:
      grads_and_vars: of this worker; gradients of their variables' shapes, IndexedSlices or None.
      cluster: the workers; the first device of each averages.
      dtype: in which dense gradients are sent; None for their own.
      densify: make IndexedSlices dense, which are gathered otherwise.

    Returns:
      The same list with means. IndexedSlices stay sparse, with the rows of all workers; None stays None.

    Raises:
      GraphError: outside of a graph; two variables of one name, or a gradient whose dtype cannot be averaged.
    """
    if tf.executing_eagerly():
        raise errors.GraphError(
            "Gradients are averaged over workers in a graph only. Build one: tf.Graph().as_default()"
        )
    names = [name_of(variable) for _, variable in grads_and_vars]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise errors.GraphError(f"{twice[0]} is the name of two variables, which workers tell apart by their names.")
    if cluster.size == 1:
        return list(grads_and_vars)
    keys, device, local = Keys.of(v1.get_default_graph()), cluster.devices[0], {}
    with v1.name_scope("average_over_workers"), tf.device(cluster.device):
        with tf.control_dependencies([keys.compared(cluster.membership.agreement.compare)]):
            for name, (grad, variable) in sorted(zip(names, grads_and_vars, strict=True), key=lambda pair: pair[0]):
                keys.meaning[f"the gradient of {name}"] = "none"
                if grad is not None:
                    is_sparse = isinstance(grad, tf.IndexedSlices) and not densify
                    local[name] = _slices(grad) if is_sparse else _of_shape(grad, variable)
                    rows = "rows of " if is_sparse else ""
                    keys.meaning[f"the gradient of {name}"] = rows + collectives.described(grad.dtype, variable.shape)
        arrived = _counted(cluster, 0, local.values())
        all_reduce = AllReduce([device], "collective", cluster.size, name=f"averaging {list(local)}", dtype=dtype)
        [means] = all_reduce.mean([list(local.values())])
        with tf.control_dependencies([_counted(cluster, 1, [arrived, *means])]), tf.device(device):
            means = [_slices(mean) if isinstance(mean, tf.IndexedSlices) else tf.identity(mean) for mean in means]
    by_name = dict(zip(local, means, strict=True))
    return [(by_name.get(name), variable) for name, (_, variable) in zip(names, grads_and_vars, strict=True)]


def _counted(cluster: Cluster, which: int, done: Iterable) -> tf.Tensor:
    """Counts in cluster.counts once these are computed."""

    def count():
        cluster.counts[which] += 1
        return np.True_

    with tf.control_dependencies([each.op for each in done]), tf.device(HOST):
        return tf.numpy_function(count, [], tf.bool)


def _slices(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)


def _of_shape(grad: Gradient, variable: tf.Variable) -> tf.Tensor:
    """Returns a dense gradient of a static shape."""
    grad = tf.convert_to_tensor(grad)
    if not grad.dtype.is_floating:
        raise errors.GraphError(f"The gradient of {name_of(variable)} is {grad.dtype.name}, which has no mean.")
    return tf.ensure_shape(grad, variable.shape)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):
    """Copies one worker's global variables to all workers, once they are initialised or restored.

    It makes sure that their sessions are of the cluster, that their variables and gradients have the same names, dtypes
    and shapes, and that known numbers are averaged correctly. If a step fails because a worker is missing, it names
    that one; the session is not reopened, as MonitoredSession would.
    """

    def __init__(self, root_rank: int = 0, device: str = "", cluster: Cluster | None = None):
        """Chooses the source of the values.

        Args:
          root_rank: index of the worker that has them: the one that restores a checkpoint.
          device: not used; Horovod's.
          cluster: the workers; by default those of tower_train.cluster.init().
        """
        self._root, self._cluster = root_rank, cluster or current()
        self._broadcast = None
        self._is_open = False

    def begin(self):
        self._is_open = False
        if self._cluster.size == 1 or (self._broadcast and self._broadcast.graph is v1.get_default_graph()):
            return
        self._broadcast = broadcast_variables(v1.global_variables(), self._root, self._cluster)

    def after_create_session(self, session, coord):
        if self._cluster.size == 1:
            return
        member = self._cluster.membership
        if self._is_open:  # MonitoredSession reopens itself after an error, alone
            raise member.failure_behind(tf.errors.UnavailableError(None, None, "a step has failed"))
        self._is_open = True
        _check_session(session, self._cluster)
        member.session_opened(session)
        session.run(self._broadcast)


def _check_session(session: v1.Session, cluster: Cluster) -> None:
    """Raises ConfigError for a session in which a step would wait for ever, or change another worker's variables."""
    master = session.sess_str.decode()
    if master != cluster.target:
        raise errors.ConfigError(
            f"This session's master is {master!r}, where there are no other workers. Open it with "
            f"master=cluster.target, which is {cluster.target!r}."
        )
    local = f"{cluster.device}/"
    if others := [device.name for device in session.list_devices() if not device.name.startswith(local)]:
        raise errors.ConfigError(
            f"This session sees {others[0]}, another worker's. Open it with config=cluster.session_config, changed as "
            "you like."
        )


def broadcast_variables(
    variables: Sequence[tf.Variable], root_rank: int = 0, cluster: Cluster | None = None
) -> tf.Operation:
    """Makes an operation that copies worker root_rank's values of variables to all workers.

    All workers must run it. It ends all if a worker's variables, or its gradients that DistributedOptimizer averages,
    differ from the chief's in name, dtype or shape.

    Args:
      variables: initialised in worker root_rank, of known shapes.
      root_rank: index of that worker.
      cluster: the workers; by default those of tower_train.cluster.init().

    Raises:
      GraphError: no such worker, a variable that cannot be broadcast, or no cluster yet.
    """
    cluster = cluster or current()
    check_rank(root_rank, cluster)
    if cluster.size == 1:
        return tf.no_op("broadcast")
    keys = Keys.of(v1.get_default_graph())
    keys.meaning |= {name_of(each): collectives.described(each.dtype.base_dtype, each.shape) for each in variables}
    with tf.device(cluster.device), tf.control_dependencies([keys.compared(cluster.membership.agreement.compare)]):
        return collectives.broadcast_variables(variables, cluster.size, cluster.rank == root_rank)


def check_rank(root_rank: int, cluster: Cluster) -> None:
    """Raises GraphError for a number that is no worker's."""
    if not 0 <= root_rank < cluster.size:
        raise errors.GraphError(f"root_rank={root_rank}: there are workers 0 to {cluster.size - 1}. Choose one.")
