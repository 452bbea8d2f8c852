"""Training of graph-mode programs with sessions of their own on several workers, after Horovod's model."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.program import Cluster, current
from tower_train.graph import collectives
from tower_train.graph.collectives import Keys, average_over_workers
from tower_train.graph.gradients import GradientsAndVariables, name_of

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
        return average_over_workers(grads_and_vars, self._cluster.workers, self._dtype, self._densify)

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
    own = f"{cluster.workers.device}/"
    if others := [device.name for device in session.list_devices() if not device.name.startswith(own)]:
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
    workers, keys = cluster.workers, Keys.of(v1.get_default_graph())
    keys.meaning |= {name_of(each): collectives.described(each.dtype.base_dtype, each.shape) for each in variables}
    with tf.device(workers.device), tf.control_dependencies([keys.compared(workers)]):
        return collectives.broadcast_variables(variables, workers.size, cluster.rank == root_rank)


def check_rank(root_rank: int, cluster: Cluster) -> None:
    """Raises GraphError for a number that is no worker's."""
    if not 0 <= root_rank < cluster.size:
        raise errors.GraphError(f"root_rank={root_rank}: there are workers 0 to {cluster.size - 1}. Choose one.")
