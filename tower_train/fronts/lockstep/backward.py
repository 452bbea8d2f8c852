"""The gradient of the whole batch's loss, from the losses of towers, including those through joined tensors."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.exchange import Merge
from tower_train.fronts.lockstep.meeting import Meeting
from tower_train.fronts.lockstep.requests import Loss
from tower_train.fronts.lockstep.tower import added
from tower_train.graph import gradients
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables


def batch_gradients(meeting: Meeting, losses: Sequence[Loss]) -> GradientsAndVariables:
    """Computes the gradient of the whole batch's loss: the mean of the towers' losses, weighted by their examples.

    A tower's loss depends on the others' weights through joined tensors: the sum over towers of the gradients by a
    joined tensor goes back, row by row, to the towers of its rows.

    Args:
      meeting: the towers, in the phase in which the losses were computed.
      losses: over towers, with variables and an optimizer, by whose scale the gradient is multiplied.

    Raises:
      ConfigError: no loss depends on any of the variables.
    """
    towers, variables = meeting.towers, losses[0].variables
    scale = losses[0].optimizer.scale_loss(tf.ones([], losses[0].value.dtype))
    rows, of_rows = [[] for _ in towers], [[] for _ in towers]  # over towers: of joined tensors, and gradients by them
    for k in reversed(range(len(towers[0].joins))):
        local, copies = zip(*(tower.joins[k] for tower in towers), strict=True)
        by_tower = []
        for i, tower in enumerate(towers):
            # Weighted afterwards: so it overflows and is rounded where the gradient of one device is.
            of_loss = [
                _times(grad, tower.part.share) for grad in tower.gradients([losses[i].value], [scale], copies[i])
            ]
            of_later = tower.gradients(rows[i], of_rows[i], copies[i]) if rows[i] else [None] * len(of_loss)
            by_tower.append([added(pair) for pair in zip(of_loss, of_later, strict=True)])
        with tf.device(meeting.device):
            sums = [added(of_towers) for of_towers in zip(*by_tower, strict=True)]
            reached = [(each, total) for *each, total in zip(*local, sums, strict=True) if total is not None]
            for of_towers, cut in zip((each for each, _ in reached), _cut(meeting, reached), strict=True):
                for i, (part, grad) in enumerate(zip(of_towers, cut, strict=True)):
                    rows[i].append(part)
                    of_rows[i].append(grad)
    of_weights = [
        tower.weight_gradients(
            [loss.value, *rows[i]], [scale * tf.cast(tower.part.share, scale.dtype), *of_rows[i]], variables
        )
        for i, (tower, loss) in enumerate(zip(towers, losses, strict=True))
    ]
    if all(grad is None for grads in of_weights for grad in grads):
        raise errors.ConfigError(
            f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
            "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
            "two losses in one list."
        )
    with tf.device(HOST):
        return _total(meeting, [list(zip(grads, variables, strict=True)) for grads in of_weights])


def _times(grad, share: tf.Tensor):
    return None if grad is None else tf.convert_to_tensor(grad) * tf.cast(share, grad.dtype)


def _cut(meeting: Meeting, joined: Sequence[tuple]) -> list[list[tf.Tensor]]:
    """Cuts gradients by joined tensors into those by the towers' rows of them.

    Args:
      meeting: of the towers.
      joined: over joined tensors, the towers' rows, and the sum of these towers' gradients.

    Returns:
      Over joined tensors and towers, the gradients.
    """
    sizes = [[tf.shape(rows)[0] for rows in meeting.rows(of_towers)] for of_towers, _ in joined]
    begins = meeting.exchange([(Merge.BEFORE, tf.add_n(each)) for each in sizes])
    wholes = meeting.exchange([(Merge.SUM, total) for _, total in joined])
    cuts = []
    for (of_towers, _), size_of_each, begin, whole in zip(joined, sizes, begins, wholes, strict=True):
        cuts.append([])
        for rows, size in zip(of_towers, size_of_each, strict=True):
            missing = tf.zeros(tf.concat([[tf.shape(rows)[0] - size], tf.shape(rows)[1:]], 0), whole.dtype)
            cuts[-1].append(tf.concat([whole[begin : begin + size], missing], axis=0))
            begin += size
    return cuts


def _total(meeting: Meeting, tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the sums over the towers of all processes, with the slices that one device would have."""
    trained = gradients.with_gradients(tower_grads)  # names variables without gradients
    if meeting.is_alone:
        return trained[0]
    variables = [variable for _, variable in trained[0]]
    by_variable = [[grad for grad, _ in of_towers] for of_towers in zip(*trained, strict=True)]
    wholes = iter(meeting.exchange([sent for grads in by_variable for sent in _sent(grads)]))
    in_float16, total = _computed_in_float16(meeting.model), []
    for grads, variable in zip(by_variable, variables, strict=True):
        whole = next(wholes)
        if isinstance(grads[0], tf.IndexedSlices):
            whole = tf.IndexedSlices(whole, next(wholes), grads[0].dense_shape)
            whole = whole if _has_rows_each(grads[0].indices) else _with_rows_once(whole)
        elif id(variable) in in_float16:  # one device sums in float16, where the sum may overflow
            whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
        total.append((whole, variable))
    return total


def _sent(grads: Sequence) -> list[tuple[Merge, tf.Tensor]]:
    """Returns the towers' gradients of a variable for an exchange; those of slices are values and indices."""
    if not isinstance(grads[0], tf.IndexedSlices):
        return [(Merge.SUM, tf.add_n(grads))]
    return [(Merge.ROWS, tf.concat([getattr(g, name) for g in grads], axis=0)) for name in ("values", "indices")]


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


def _with_rows_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the slices of each row."""
    rows, places = tf.unique(slices.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows)), rows, slices.dense_shape
    )


def _computed_in_float16(model: keras.Model) -> set[int]:
    """Returns the ids of weights whose innermost layer computes in float16."""
    dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(model) for v in layer.trainable_weights}
    return {key for key, dtype in dtypes.items() if dtype == "float16"}
