"""The gradient of the whole batch's loss, from the losses of towers; it goes through joined tensors to their rows."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.meeting import Meeting
from tower_train.fronts.lockstep.requests import Loss
from tower_train.graph import gradients
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables


def batch_gradients(meeting: Meeting, losses: Sequence[Loss]) -> GradientsAndVariables:
    """Computes the gradient of the whole batch's loss: the mean of the towers' losses, weighted by their examples.

    Args:
      meeting: the towers, in the phase in which the losses were computed.
      losses: over towers, with variables and an optimizer, by whose scale the gradient is multiplied.

    Raises:
      ConfigError: no loss depends on any of the variables.
    """
    towers, variables = meeting.towers, losses[0].variables
    scale = losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
    copies = [(i, key, copy) for i, tower in enumerate(towers) for key, copy in tower.copies]
    # Not by a tape, which would place all towers' gradients on one device.
    grads = tf.gradients(
        [loss.value for loss in losses],
        [copy for *_, copy in copies],
        [scale * tf.cast(tower.part.share, scale.dtype) for tower in towers],
    )
    of_weights = [{id(variable): [] for variable in variables} for _ in towers]
    for (i, key, _), grad in zip(copies, grads, strict=True):
        if grad is not None and key in of_weights[i]:
            of_weights[i][key].append(grad)
    if not any(grads for of_tower in of_weights for grads in of_tower.values()):
        raise errors.ConfigError(
            f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
            "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
            "two losses in one list."
        )
    with tf.device(HOST):
        return _total(meeting, [[(_added(of_tower[id(v)]), v) for v in variables] for of_tower in of_weights])


def _added(grads: Sequence):
    """Adds gradients by copies of a weight; one alone may be sparse."""
    return tf.add_n(grads) if len(grads) > 1 else grads[0] if grads else None


def _total(meeting: Meeting, tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the sums over the towers of all processes, with the slices that one device would have."""
    trained = gradients.with_gradients(tower_grads)  # names variables without gradients
    if meeting.is_alone:
        return trained[0]
    by_variable = [([grad for grad, _ in of_towers], of_towers[0][1]) for of_towers in zip(*trained, strict=True)]
    dense = [tf.add_n(grads) for grads, _ in by_variable if not isinstance(grads[0], tf.IndexedSlices)]
    sums, in_float16, total = iter(meeting.exchange.sum(dense)), _computed_in_float16(meeting.model), []
    for grads, variable in by_variable:
        if isinstance(grads[0], tf.IndexedSlices):
            parts = ([grad.values for grad in grads], [grad.indices for grad in grads])
            rows = (meeting.exchange.rows(tf.concat(part, axis=0)) for part in parts)
            whole = tf.IndexedSlices(*rows, grads[0].dense_shape)
            whole = whole if _has_rows_each(grads[0].indices) else gradients.sum_rows(whole)
        else:
            whole = next(sums)
            if id(variable) in in_float16:  # one device sums in float16, where the sum may overflow
                whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
        total.append((whole, variable))
    return total


def _has_rows_each(indices: tf.Tensor) -> bool:
    """Returns whether one device too has a row once for each use by an example, which Keras' Adam squares one by one.

    Other rows are of no examples, as positions', or unique, as those of a sparse input's product.
    """
    constants = {id(inside) for outside, inside in indices.graph.captures if hasattr(outside, "numpy")}
    ahead, seen = [indices], set()
    while indices.op.type in ("Reshape", "Identity", "Cast"):
        indices = indices.op.inputs[0]
    if indices.op.type == "Unique":
        return False
    while ahead:
        tensor = ahead.pop()
        op = tensor.op
        if op.type == "Placeholder" and (id(tensor) not in constants or tensor.dtype == tf.resource):
            return True
        if op not in seen and op.type not in ("Shape", "ShapeN", "Size"):
            seen.add(op)
            ahead += op.inputs
    return False


def _computed_in_float16(model: keras.Model) -> set[int]:
    """Returns the ids of weights whose innermost layer computes in float16."""
    dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(model) for v in layer.trainable_weights}
    return {key for key, dtype in dtypes.items() if dtype == "float16"}
