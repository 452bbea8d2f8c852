"""One call of Estimator.train: one update for all towers, and the look at what is not finite."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.program import Cluster
from tower_train.fronts.tf_estimator.captured import Captured, assign
from tower_train.fronts.tf_estimator.inputs import Batches
from tower_train.fronts.tf_estimator.library import api
from tower_train.graph import gradients, random_state
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST, Devices

v1 = tf.compat.v1

# Of this process with others, which keep what a key was used for. All have as many.
_trainings = itertools.count()


class NonFiniteLossError(errors.NonFiniteError, v1.train.NanLossDuringTrainingError):
    """A loss or a gradient that is NaN or infinite, also by the library's name for it."""

    __str__ = Exception.__str__  # the library's contains only its name


class Training(v1.train.SessionRunHook):
    """A call of Estimator.train; in its session it stops at a step that was not finite, which has changed no variable.

    Args:
      placed: this worker's devices.
      cluster: of several workers.

    Attributes:
      worker, num_towers: the index of this worker, and the number of all workers' towers.
      all_reduce: averages between workers.
      batches: of several towers.
      name: separates its messages.
      finite: as of gradients.update_if_finite; None if a single tower updates its variables without an optimizer of
        TensorFlow's.
      checked: names of its columns.
    """

    batches: Batches | None = None
    finite: tf.Tensor | None = None
    checked: tuple[str, ...] = ()

    def __init__(self, placed: Devices, cluster: Cluster | None = None):
        self.cluster, self.worker, workers = cluster, cluster.rank if cluster else 0, cluster.size if cluster else 1
        self.num_towers, self.name = len(placed.towers) * workers, f"training {next(_trainings) if cluster else 0}"
        self.all_reduce = AllReduce((HOST,), "collective", num_workers=workers, name=self.name)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(None if self.finite is None else [self.finite, v1.train.get_global_step()])

    def after_run(self, run_context, run_values):
        if run_values.results is None:
            return
        finite, step = run_values.results
        if not finite.all():
            raise NonFiniteLossError(
                f"not finite at step {step + 1}: {gradients.not_finite(finite, self.checked)}. This step has not "
                "changed the variables, and the last checkpoint stays. Try a lower learning rate, or look at the "
                "examples."
            )


def train_step(specs: list[api.EstimatorSpec], captures: list[Captured], training: Training) -> api.EstimatorSpec:
    """Makes one update for all towers.

    Returns the first tower's spec, with the mean of all towers' losses, and the op that does a step of all towers.

    Raises:
      GraphError: towers that cannot be averaged.
    """
    for captured in captures:
        _refuse_waits(captured)
    is_alone = captures[0].num_towers == 1
    losses = [tf.reshape(spec.loss, []) for spec in specs]
    loss = specs[0].loss
    if not is_alone:
        [[loss]] = training.all_reduce.mean([[tf.add_n(losses) / len(specs)]])
        for summary in v1.get_collection(v1.GraphKeys.SUMMARIES):
            if summary.op.type == "ScalarSummary" and summary.op.name == "loss":  # of the first tower
                compat.set_input(summary.op, 1, tf.cast(loss, summary.op.inputs[1].dtype))
    with tf.control_dependencies(losses):  # by then layers have read what is assigned, such as their seeds
        assigned = _assign_merged(captures, training.all_reduce)
    counts = {len(captured.updates) for captured in captures}
    if is_alone and counts == {0}:
        return specs[0]._replace(train_op=tf.group(specs[0].train_op, assigned))
    if len(counts) > 1 or counts == {0}:
        raise errors.GraphError(
            f"model_fn called apply_gradients of a tf.compat.v1.train optimizer {sorted(counts)} times in its towers. "
            "Each tower must do so equally often, at least once: that is where gradients are averaged."
        )
    training.finite, applied = _update_if_finite(losses, captures, loss, training.all_reduce, assigned)
    training.checked = ("the loss", *(f"the gradient of {variable.op.name}" for _, variable in applied))
    for captured in captures:
        for update in captured.updates:
            compat.add_control_input(update.placeholder, training.finite.op)  # ops that wait for it wait for the update
    op = tf.group(specs[0].train_op, training.finite, assigned)
    # The optimizers' own ops are in a branch, where whoever loads this graph would not find them.
    v1.get_default_graph().get_collection_ref(v1.GraphKeys.TRAIN_OP)[:] = [op]
    return specs[0]._replace(loss=loss, train_op=op)


def _refuse_waits(captured: Captured) -> None:
    """Raises GraphError for a gradient that waits for an update: all are computed before the first one."""
    pairs = [pair for update in captured.updates for pair in update.grads_and_vars]
    before = random_state.ancestors([grad.op for grad, _ in pairs if grad is not None])
    if any(update.placeholder in before for update in captured.updates):
        raise errors.GraphError(
            "model_fn computes a gradient after an update (tf.control_dependencies on its train_op). All updates of a "
            "step are done at once here, from the same variables: join them by tf.group(first, second)."
        )


def _update_if_finite(losses: list[tf.Tensor], captures: list[Captured], loss: tf.Tensor, all_reduce, assigned):
    """Averages and applies the gradients, call by call, after what layers assign; returns what is finite, and the
    applied pairs looked at."""
    calls = list(zip(*[captured.updates for captured in captures], strict=True))
    averaged = [gradients.average_gradients([update.grads_and_vars for update in call]) for call in calls]
    if all_reduce.num_workers > 1:
        flat = [_of_known_shape(*pair) for means in averaged for pair in means]
        over_workers = iter(all_reduce.mean([flat])[0])
        averaged = [[(next(over_workers), variable) for _, variable in means] for means in averaged]
    tower_grads = [
        [p for update in c.updates if not update.looks_itself for p in update.grads_and_vars] for c in captures
    ]
    applied = [pair for call, mean in zip(calls, averaged, strict=True) if not call[0].looks_itself for pair in mean]

    def apply():
        return tf.group([call[0].apply(mean) for call, mean in zip(calls, averaged, strict=True)])

    # The first tower's updates were told to wait for these, such as its UPDATE_OPS.
    before = [assigned, *(op for call in calls for op in call[0].placeholder.control_inputs)]
    with tf.control_dependencies(before):
        return gradients.update_if_finite(zip(losses, tower_grads, strict=True), applied, loss, apply), applied


def _of_known_shape(grad: tf.Tensor | tf.IndexedSlices, variable: tf.Variable) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient of its variable's shape; of a sparse one, workers may have rows for any number of indices."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.ensure_shape(grad, variable.shape)
    values = tf.ensure_shape(grad.values, [None, *variable.shape[1:]])
    any_number = v1.placeholder_with_default(values, [None, *variable.shape[1:]])
    return tf.IndexedSlices(any_number, grad.indices, grad.dense_shape)


def _assign_merged(captures: Sequence[Captured], all_reduce: AllReduce) -> tf.Operation:
    """Returns the op that assigns what the layers of all towers do: the mean over the towers of all workers to
    floating-point variables such as moving averages, the first tower's value to others such as seeds."""
    of_towers = [
        (variable, [c.assigned[i][1] for c in captures]) for i, (variable, _) in enumerate(captures[0].assigned)
    ]
    floating = {
        i: tf.ensure_shape(tf.add_n(values) / len(captures), variable.shape)
        for i, (variable, values) in enumerate(of_towers) if variable.dtype.is_floating
    }  # fmt: skip
    means = dict(zip(floating, all_reduce.mean([list(floating.values())])[0], strict=True))
    return assign((variable, means.get(i, values[0])) for i, (variable, values) in enumerate(of_towers))
