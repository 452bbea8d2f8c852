"""One call of Estimator.train: means over its towers, and updates by them, where and when model_fn makes them."""

import functools
import itertools
from collections.abc import Callable

import tensorflow as tf

from tower_train.cluster.program import Cluster
from tower_train.fronts import compat, meeting
from tower_train.fronts.averages import Averages
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.inputs import Batches
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.gradients import GradientsAndVariables

v1 = tf.compat.v1

# Of this process with others, which keep what a key was used for. All have as many.
_trainings = itertools.count()


class Training:
    """A call of Estimator.train, on this worker's devices and those of a cluster; batch_norm is RunConfig's."""

    batches: Batches | None = None  # of several towers
    before_update: Callable[[], list[tf.Operation]] = staticmethod(list)  # makes ops for which an update waits

    def __init__(
        self, placed: Devices, cluster: Cluster | None = None, batch_norm: str = "global", is_compiled: bool = False
    ):
        self.batch_norm, self.is_compiled = batch_norm, is_compiled
        self.cluster, self.worker, workers = cluster, cluster.rank if cluster else 0, cluster.size if cluster else 1
        self.num_towers = len(placed.towers) * workers
        self.name = f"training {next(_trainings) if cluster else 0}"  # separates its messages
        self.all_reduce = AllReduce((HOST,), "collective", num_workers=workers, name=self.name)
        shares = [1 / len(placed.towers)] * len(placed.towers)  # of this worker's towers, about 1 in all
        over_workers = lambda tensors: self.all_reduce.mean([list(map(_of_any_rows, tensors))])[0]  # noqa: E731
        self.averages = Averages(shares, over_workers, float(workers))

    def update(
        self,
        optimizer,
        grads_and_vars: GradientsAndVariables,
        apply: Callable[[GradientsAndVariables], tf.Operation],
    ) -> tf.Operation:
        """Applies the mean of all towers' gradients, once, by the first tower's optimizer, which all have from then on.

        apply: (means and variables) -> op.
        """

        def merge(asked: list[tuple]) -> tuple:
            per_tower = [pairs for _, pairs in asked]
            grads = [grad for pairs in per_tower for grad, _ in pairs if grad is not None]
            with tf.control_dependencies([grad.op for grad in grads]):  # by then layers have read their variables
                before = self.before_update()
            means = self.averages.updates(per_tower) if self.num_towers > 1 else per_tower[0]
            with tf.control_dependencies(before):
                return asked[0][0], apply(means)

        mine = optimizer, list(grads_and_vars)
        first, op = meeting.meet(mine, merge, f"{type(optimizer).__name__}.apply_gradients")
        if optimizer is not first:  # its slots, and what else the update made, are there for a program that asks
            vars(optimizer).update(vars(first))
        return op


def _averaging(apply_gradients: Callable) -> Callable:
    """Makes towers meet in an optimizer's apply_gradients."""

    @functools.wraps(apply_gradients)
    def in_all_towers(optimizer, grads_and_vars, *args, **kwargs):
        training = meeting.owner(Training)
        if training is None:
            return apply_gradients(optimizer, grads_and_vars, *args, **kwargs)
        apply = lambda means: apply_gradients(optimizer, means, *args, **kwargs)  # noqa: E731
        return training.update(optimizer, grads_and_vars, apply)

    return in_all_towers


for _optimizer in (v1.train.Optimizer, library.keras_v2.optimizers.legacy.Optimizer):
    compat.wrap_method(_optimizer, "apply_gradients", _averaging)


def _of_any_rows(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Returns a sparse gradient with rows of any number of indices, as workers may have; others as they are."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    any_number = v1.placeholder_with_default(grad.values, [None, *grad.shape[1:]])
    return tf.IndexedSlices(any_number, grad.indices, grad.dense_shape)
