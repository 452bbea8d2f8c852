"""The calls at which the towers of a step meet: joins of rows, `once`, updates and metrics.

Outside of towers each does what it says, on one device.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, meeting, parts, placement
from tower_train.fronts.averages import linked
from tower_train.fronts.keras_building import output_names
from tower_train.fronts.keras_towers.step import NOTED, Step
from tower_train.graph import context


def once(function: Callable[[], Any]):
    """Calls a function once and not in every tower, such as one that assigns to variables; returns its result in each.

    Code after it sees the new values. Values that the function uses are the first tower's, or from a `join`.
    """
    step = meeting.owner(Step)
    return function() if step is None else step.meet(None, lambda _: step.once(function), "steps.once")


def join(tensors):
    """Returns the rows of all towers, in the order of the batch, on each tower's device; gradients go to the towers of
    the rows. Outside of towers, the tensors.

    Args:
      tensors: a tensor [rows, ...] or a structure of them.
    """
    step = meeting.owner(Step)
    if step is None and (tower := meeting.current()) and tower.count > 1:
        raise errors.ConfigError("steps.join is for a train_step of Keras; in a model_fn call steps.mean.")
    if step is None:
        return tensors
    mine = keras.tree.map_structure(parts.as_tensor, tensors)
    if any(leaf is not None and leaf.shape.rank == 0 for leaf in keras.tree.flatten(mine)):
        raise errors.ConfigError("steps.join got a scalar; join tensors that have a row for each example.")
    return _join(step, mine)


def check_shares(step: Step) -> None:
    """Refuses a batch of whose tensors a tower has different shares, as a mean over its rows of one has one weight. If
    only the step can tell, it fails with a message that `explained` recognizes."""
    fits = []
    for first, *others in (part.cuts for part in step.whole.parts if step.whole.count > 1):
        for each in others:
            here, there = first.examples * each.batch, each.examples * first.batch
            are_filled = first.batch > 0, each.batch > 0  # of nothing and something all products are 0
            if all(isinstance(size, int) for size in (here, there)) and (here != there or len({*are_filled}) > 1):
                raise errors.ConfigError(f"a batch of {first.batch} and {each.batch} rows {_OTHER_SHARES}")
            fits.append(tf.logical_and(tf.equal(here, there), tf.equal(*are_filled)))
    if fits:
        tf.debugging.Assert(tf.reduce_all(tf.stack(fits)), [f"a batch of different numbers of rows {_OTHER_SHARES}"])


def mean(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a floating-point tensor over the towers of all workers, weighted by their examples, with its
    exact gradient; outside of towers, the tensor.

    It makes a quotient of sums that of the whole batch, such as a mean over words that are not masked:
    `tf.reduce_mean(mask * losses) / steps.mean(tf.reduce_mean(mask))`.
    """
    over_towers = context.current().mean
    return over_towers([tf.convert_to_tensor(tensor)], what="steps.mean")[0] if over_towers else tensor


def join_batch(model: keras.Model, x, y, y_pred, sample_weight, needs_x: bool):
    """Joins a batch and a model's outputs for it, in which scalars are means over examples.

    Raises ConfigError for an output whose first axis is not the batch. If only the step can tell, it fails with a
    message that `explained` recognizes.
    """
    step = meeting.owner(Step)
    if step is None:
        return x, y, y_pred, sample_weight
    if step.whole.count > 1:
        inputs = [parts.batch_size(leaf) for leaf in keras.tree.flatten(x) if leaf is not None and leaf.shape.rank]
        for name, output in zip(output_names(model, y_pred), keras.tree.flatten(y_pred), strict=True):
            if isinstance(output, tf.Tensor) and output.shape.rank:
                _check_rows(f"{type(model).__name__}: the output {name}", output, inputs)
    return _join(step, keras.tree.map_structure(parts.as_tensor, (x if needs_x else None, y, y_pred, sample_weight)))


def _join(step: Step, mine):
    if step.whole.count == 1:
        return mine
    whole = step.meet(mine, step.whole.values, "steps.join")
    return keras.tree.map_structure(functools.partial(_joined, step), mine, whole)


def _joined(step: Step, mine, whole):
    """Returns a tower's copy of a joined tensor, with its gradient and what Keras attached to it."""
    if not isinstance(mine, tf.Tensor):
        return whole

    def gradient(grad):
        if mine.shape.rank == 0:
            return [step.whole.gradient_of_mean(grad)]
        merge = lambda asked: step.whole.gradients_of_rows(*zip(*asked, strict=True))  # noqa: E731
        over_towers = step.meet((grad, tf.shape(mine)[0]), merge, "the gradient of steps.join")
        my_grad = over_towers[meeting.current().place]
        missing = tf.shape(mine)[0] - tf.shape(my_grad)[0]  # of a tower without examples
        my_grad = tf.pad(my_grad, [[0, missing], *[[0, 0]] * (mine.shape.rank - 1)])
        return [tf.ensure_shape(my_grad, mine.shape)]

    [copy] = linked([mine], [whole], gradient)
    attached = compat.attached(mine)
    compat.attach(copy, {name: _joined(step, attached[name], each) for name, each in compat.attached(whole).items()})
    return copy


_REMARKS = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m.*", re.DOTALL)  # of Keras
_OTHER_ROWS = (
    "has an axis before that of the examples, or none, and towers join outputs by examples. Put the batch first, "
    "such as [batch, time] or [batch, 2]; a scalar is a mean over the examples. Or train on one device: gpus=1."
)

_OTHER_SHARES = (
    "does not part alike into the towers, so means over rows would have other weights than on one device. Let each "
    "number be a multiple of that of towers, and leave smaller last batches out (drop_remainder=True)."
)


def _check_rows(what: str, output: tf.Tensor, inputs: Sequence[parts.Size]) -> None:
    """Refuses an output whose number of rows is not a multiple of the examples."""
    rows, message = parts.batch_size(output), f"{what} of shape {output.shape} {_OTHER_ROWS}"
    known = [size for size in inputs if isinstance(size, int)]
    if isinstance(rows, int) and any(rows % max(size, 1) == 0 for size in known):
        return
    if isinstance(rows, int) and len(known) == len(inputs):
        raise errors.ConfigError(message)
    fits = tf.reduce_any(tf.stack([rows % tf.maximum(size, 1) == 0 for size in inputs]))
    tf.debugging.Assert(fits, [message])  # in a tf.function it runs by itself


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises a ConfigError for a step within this block whose outputs have other rows than examples, whose batch does
    not part alike, or with a layer that does not take its inputs; takes from a user's error what Keras puts around it:
    where it was, and arguments."""
    try:
        yield
    except ValueError as error:
        wrapped = _REMARKS.fullmatch(str(error))
        if wrapped and isinstance(error, errors.UserError):
            error.args = wrapped.groups()
        elif wrapped and "incompatible with the layer" in wrapped[1]:
            raise errors.ConfigError(
                f"multi_gpu_model: {wrapped[1].rstrip('.')}. Give the layer such inputs, or make it for these."
            ) from None
        raise
    except tf.errors.InvalidArgumentError as error:
        ends = "|".join(map(re.escape, (_OTHER_ROWS, _OTHER_SHARES)))
        if found := re.search(rf"assertion failed: \[(.*? (?:{ends}))\]", error.message, re.DOTALL):
            raise errors.ConfigError(found[1]) from None
        raise


def _updating(apply: Callable) -> Callable:
    """Makes towers meet in an optimizer's `apply`, which apply_gradients calls."""

    @functools.wraps(apply)
    def in_all_towers(optimizer, grads, trainable_variables=None):
        step, updates = meeting.owner(Step), NOTED.get()
        variables = compat.trained_by(optimizer) if trainable_variables is None else trainable_variables
        if updates is not None:
            updates.append((optimizer, list(zip(grads, variables, strict=True))))
        if step is None:
            return apply(optimizer, grads, trainable_variables)

        def merge(asked):
            grads, variables = zip(*(step.whole.updates(asked) or asked[0]), strict=True)
            with step.compiled_if(compat.updates_densely(optimizer, grads)) as is_compiled:
                grads = _joined_by_device(grads, variables) if is_compiled else grads
                return apply(optimizer, grads, variables)

        return step.meet(list(zip(grads, variables, strict=True)), merge, f"an update of {type(optimizer).__name__}")

    return in_all_towers


def _joined_by_device(grads: Sequence[tf.Tensor], variables: Sequence) -> list[tf.Tensor]:
    """Returns the gradients times a 1 that those of a device have in common: XLA makes one program of operations that
    are connected."""
    ones, joined = {}, []
    for grad, variable in zip(grads, variables, strict=True):
        device = placement.of(variable)
        with tf.device(device):
            one = ones.setdefault((device, grad.dtype), tf.ones([], grad.dtype))
            joined.append(grad * one)
    return joined


def _measuring(update_state: Callable) -> Callable:
    """Makes towers meet in a metric's update_state, which gets the rows of all and the means of scalars."""

    @functools.wraps(update_state)
    def in_all_towers(metric, *args, **kwargs):
        step = meeting.owner(Step)
        if step is None:
            return update_state(metric, *args, **kwargs)

        def merge(asked):
            args, kwargs = step.whole.values(asked)
            return update_state(metric, *args, **kwargs)

        return step.meet((args, kwargs), merge, f"update_state of {metric.name}")

    return in_all_towers


compat.wrap_method(compat.BaseOptimizer, "apply", _updating)
compat.wrap_method(keras.metrics.Metric, "update_state", _measuring)
