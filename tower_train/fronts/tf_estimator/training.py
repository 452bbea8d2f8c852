"""One call of Estimator.train: means over its towers, and updates by them, where and when model_fn makes them."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.cluster.program import Cluster
from tower_train.fronts import compat, meeting
from tower_train.fronts.averages import Averages
from tower_train.fronts.tf_estimator import library
from tower_train.fronts.tf_estimator.inputs import Batches
from tower_train.graph import gradients
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.gradients import GradientsAndVariables

v1 = tf.compat.v1
_NOT_FINITE = "tower_train: not finite"

# Of this process with others, which keep what a key was used for. All have as many.
_trainings = itertools.count()


class NonFiniteLossError(errors.NonFiniteError, v1.train.NanLossDuringTrainingError):
    """A loss or a gradient that is NaN or infinite, also by the library's name for it."""

    __str__ = Exception.__str__  # the library's contains only its name


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
        self._checked: list[list[str]] = []  # over updates, the names of the gradients that are checked

    def update(
        self,
        optimizer,
        grads_and_vars: GradientsAndVariables,
        apply: Callable[[GradientsAndVariables], tf.Operation],
        looks_itself: bool = False,
    ) -> tf.Operation:
        """Applies the mean of all towers' gradients, once, by the first tower's optimizer, which all have from then on.

        apply: (means and variables) -> op. looks_itself: whether it handles gradients that are not finite.
        """

        def merge(asked: list[tuple]) -> tuple:
            per_tower = [pairs for _, pairs in asked]
            grads = [grad for pairs in per_tower for grad, _ in pairs if grad is not None]
            with tf.control_dependencies([grad.op for grad in grads]):  # by then layers have read their variables
                before = self.before_update()
            means = self.averages.updates(per_tower) if self.num_towers > 1 else per_tower[0]
            with tf.control_dependencies(before):
                means = means if looks_itself else self._finite(self.averages.before_means(per_tower), means)
                return asked[0][0], apply(means)

        mine = optimizer, list(grads_and_vars)
        first, op = meeting.meet(mine, merge, f"{type(optimizer).__name__}.apply_gradients")
        if optimizer is not first:  # its slots, and what else the update made, are there for a program that asks
            vars(optimizer).update(vars(first))
        return op

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises a NonFiniteLossError if a step within this block met a value that is not finite."""
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            found = re.search(rf"{_NOT_FINITE} (\d+)\] \[(\d+)\] \[([01 ]+)\]", error.message)
            if not found:
                raise
            names = self._checked[int(found[1])]
            rows = np.array(found[3].split()).reshape(-1, len(names)) == "1"
            raise NonFiniteLossError(
                f"not finite at step {int(found[2]) + 1}: {gradients.describe_not_finite(rows, names)}. The variables "
                "that it belongs to are unchanged, and the last checkpoint stays. Try a lower learning rate, or look "
                "at the examples."
            ) from None

    def _finite(self, per_tower: Sequence[GradientsAndVariables], means: GradientsAndVariables):
        """Returns gradients that are there only if all are finite; else the step fails before their update."""
        trained = [variable.ref() for grad, variable in means if grad is not None]
        if not trained:
            return means
        number, step = len(self._checked), v1.train.get_global_step()
        self._checked.append([f"the gradient of {ref.deref().op.name}" for ref in trained])

        def are_finite(pairs: GradientsAndVariables) -> tf.Tensor:
            by_variable = {variable.ref(): grad for grad, variable in pairs}
            return tf.stack([gradients.is_finite(by_variable[ref]) for ref in trained])

        def fail() -> tf.Operation:
            rows = tf.concat([are_finite(pairs) for pairs in (*per_tower, means)], axis=0)
            data = [f"{_NOT_FINITE} {number}", -1 if step is None else step.value(), tf.cast(rows, tf.int32)]
            return tf.raw_ops.Assert(condition=False, data=list(map(tf.convert_to_tensor, data)), summarize=10**6)

        with v1.name_scope("check_finite"), tf.device(HOST):
            finite = tf.cond(tf.reduce_all(are_finite(means)), tf.no_op, fail)
        with tf.control_dependencies([finite]):
            identity = functools.partial(tf.nest.map_structure, tf.identity, expand_composites=True)
            return [(grad if grad is None else identity(grad), variable) for grad, variable in means]


def _averaging(apply_gradients: Callable, owner: type) -> Callable:
    """Makes towers meet in an optimizer's apply_gradients."""

    @functools.wraps(apply_gradients)
    def in_all_towers(optimizer, grads_and_vars, *args, **kwargs):
        training = meeting.owner(Training)
        if training is None:
            return apply_gradients(optimizer, grads_and_vars, *args, **kwargs)
        apply = lambda means: apply_gradients(optimizer, means, *args, **kwargs)  # noqa: E731
        return training.update(optimizer, grads_and_vars, apply, looks_itself=owner not in _OPTIMIZERS)

    return in_all_towers


_OPTIMIZERS = (v1.train.Optimizer, library.keras_v2.optimizers.legacy.Optimizer)
for _optimizer in _OPTIMIZERS:
    compat.wrap_method(_optimizer, "apply_gradients", _averaging)


def _of_any_rows(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Returns a sparse gradient with rows of any number of indices, as workers may have; others as they are."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    any_number = v1.placeholder_with_default(grad.values, [None, *grad.shape[1:]])
    return tf.IndexedSlices(any_number, grad.indices, grad.dense_shape)
