"""Training of graph-mode programs with sessions of their own on several workers, after Horovod's model."""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster.program import Cluster, current
from tower_train.graph import collectives
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import Gradient, GradientsAndVariables, variable_name

v1 = tf.compat.v1


def _optimizer_method(name: str):
    """Makes a method that is the wrapped optimizer's own."""
    return lambda self, *args, **kwargs: getattr(self._optimizer, name)(*args, **kwargs)


class DistributedOptimizer(v1.train.Optimizer):
    """An optimizer of tf.compat.v1.train whose compute_gradients gives the means over all workers.

    All else is the optimizer's own. Workers match gradients by the names of the variables, so several such optimizers
    may be in one graph. Every worker must do as many steps.

    Several towers in one worker are averaged first: optimizer.average(tower_train.average_gradients(...)).
    """

    def __init__(
        self,
        optimizer: v1.train.Optimizer,
        name: str | None = None,
        dtype: tf.DType | None = None,
        sparse_as_dense: bool = False,
    ):
        """Wraps an optimizer; GraphError before tower_train.cluster.init().

        Args:
          optimizer: any of tf.compat.v1.train, such as MomentumOptimizer, or a MixedPrecisionLossScaleOptimizer, which
            may also be around this one.
          name: for its operations.
          dtype: float16 or bfloat16 to send dense gradients in it; None for their own, or float32 for those of half of
            its size.
          sparse_as_dense: make IndexedSlices dense. Otherwise the rows of all workers, of any numbers, are gathered.
        """
        super().__init__(use_locking=False, name=name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._dtype, self._densify = optimizer, dtype, sparse_as_dense
        self._cluster = current()

    apply_gradients, get_slot, get_slot_names, variables = map(
        _optimizer_method, ("apply_gradients", "get_slot", "get_slot_names", "variables")
    )

    def compute_gradients(self, *args, **kwargs) -> GradientsAndVariables:
        """Returns (mean over workers, variable) for each variable; None where the loss does not depend on it."""
        return self.average(self._optimizer.compute_gradients(*args, **kwargs))

    def average(self, grads_and_vars: GradientsAndVariables) -> GradientsAndVariables:
        """Returns the means over workers of gradients as of compute_gradients, sparse ones with all rows. All are
        averaged in any step that uses one."""
        cluster, device = self._cluster, self._cluster.devices[0]
        if cluster.size == 1:
            return list(grads_and_vars)
        pairs = [(variable_name(variable), self._sent(grad, variable), variable) for grad, variable in grads_and_vars]
        meaning = {f"the gradient of {name}": _meaning(grad, variable) for name, grad, variable in pairs}
        with v1.name_scope("average_over_workers"), cluster.operations(meaning):
            ordered = sorted(pairs, key=lambda pair: pair[0])  # as in all workers
            local = {name: _identity(grad) for name, grad, _ in ordered if grad is not None}
            arrived = _counted(cluster, 0, local.values())
            all_reduce = AllReduce(
                [device], "collective", cluster.size, name=f"averaging {list(local)}", dtype=self._dtype
            )
            [means] = all_reduce.mean([list(local.values())])
            with tf.control_dependencies([_counted(cluster, 1, [arrived, *means])]), tf.device(device):
                by_name = dict(zip(local, map(_identity, means), strict=True))
        return [(by_name.get(name), variable) for name, _, variable in pairs]

    def _sent(self, grad: Gradient, variable: tf.Variable) -> Gradient:
        if grad is None or (isinstance(grad, tf.IndexedSlices) and not self._densify):
            return grad
        return tf.ensure_shape(tf.convert_to_tensor(grad), variable.shape)


def _identity(grad: Gradient) -> Gradient:
    return tf.nest.map_structure(tf.identity, grad, expand_composites=True)


def _meaning(grad: Gradient, variable: tf.Variable) -> str:
    rows = "rows of " if isinstance(grad, tf.IndexedSlices) else ""
    return "none" if grad is None else rows + collectives.described(grad.dtype, variable.shape)


def _counted(cluster: Cluster, which: int, done: Iterable) -> tf.Tensor:
    """Counts in cluster.counts once these are computed."""

    def count():
        cluster.counts[which] += 1
        return np.True_

    with tf.control_dependencies([each.op for each in done]), tf.device(HOST):
        return tf.numpy_function(count, [], tf.bool)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):
    """Copies one worker's global variables to all workers, once they are initialised or restored.

    It makes sure that their sessions are of the cluster, and that their variables and gradients have the same names,
    dtypes and shapes. If a step fails because a worker is missing, it names that one; the session is not reopened, as
    MonitoredSession would.
    """

    def __init__(self, root_rank: int = 0, device: str = ""):
        """Takes the index of the worker that has the values, such as a checkpoint's; device is Horovod's, not used."""
        self._root, self._cluster = root_rank, current()
        self.broadcast, self._is_open = None, False

    def begin(self):
        self._is_open = False
        if self.broadcast is None or self.broadcast.graph is not v1.get_default_graph():
            self.broadcast = broadcast_variables(v1.global_variables(), self._root)

    def after_create_session(self, session, coord):
        if self._cluster.size == 1:
            return
        member = self._cluster.membership
        if self._is_open:  # MonitoredSession reopens itself after an error, alone
            raise member.failure_behind(tf.errors.UnavailableError(None, None, "a step has failed"))
        self._is_open = True
        _check_session(session, self._cluster)
        member.session_opened(session)
        session.run(self.broadcast)


def _check_session(session: v1.Session, cluster: Cluster) -> None:
    """Raises ConfigError for a session in which a step would wait for ever, or change another worker's variables."""
    local = f"{cluster.device}/"
    if others := [device.name for device in session.list_devices() if not device.name.startswith(local)]:
        raise errors.ConfigError(
            f"This session sees {others[0]}, which is not this worker's. Open it with master=cluster.target, which is "
            f"{cluster.target!r}, and config=cluster.session_config, changed as you like."
        )


def broadcast_variables(variables: Sequence[tf.Variable], root_rank: int = 0, series: str = "") -> tf.Operation:
    """Makes an operation that copies worker root_rank's values of variables to all workers.

    All workers must run it. It ends all if a worker's variables, or its gradients that DistributedOptimizer averages,
    differ from the chief's in name, dtype or shape. `series` separates its messages from those of other graphs.

    Raises GraphError if there is no such worker, a variable has no known shape, or the cluster is not begun.
    """
    cluster = current()
    check_rank(root_rank)
    if cluster.size == 1:
        return tf.no_op("broadcast")
    meaning = {variable_name(each): collectives.described(each.dtype.base_dtype, each.shape) for each in variables}
    with cluster.operations(meaning):
        return collectives.broadcast_variables(variables, cluster.size, cluster.rank == root_rank, series)


def check_rank(root_rank: int) -> None:
    """Raises GraphError for a number that is no worker's: all would wait for it."""
    if not 0 <= root_rank < current().size:
        raise errors.GraphError(f"root_rank={root_rank}: there are workers 0 to {current().size - 1}. Choose one.")
