"""The gradient of the whole batch's loss, from the losses of towers, including those through joined tensors."""

import enum
from collections.abc import Sequence

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.exchange import Kind
from tower_train.fronts.lockstep.merges import Meeting
from tower_train.fronts.lockstep.requests import Loss
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
    shares = _shares(meeting, losses)
    rows, of_rows = [[] for _ in towers], [[] for _ in towers]  # over towers: of joined tensors, and gradients by them
    for k in reversed(range(len(towers[0].joins))):
        local, copies = zip(*(tower.joins[k] for tower in towers), strict=True)
        grads = []
        for i, tower in enumerate(towers):
            # Weighted afterwards: so it overflows and is rounded where the gradient of one device is.
            of_loss = [_times(grad, shares[i]) for grad in tower.gradients([losses[i].value], [scale], copies[i])]
            of_later = tower.gradients(rows[i], of_rows[i], copies[i]) if rows[i] else [None] * len(of_loss)
            grads.append([_sum(pair) for pair in zip(of_loss, of_later, strict=True)])
        with tf.device(meeting.device):
            sums = [_sum(of_towers) for of_towers in zip(*grads, strict=True)]
            reached = [i for i, total in enumerate(sums) if total is not None]
            parts = [[each[i] for each in local] for i in reached]
            for of_towers, cut in zip(parts, _cut(meeting, parts, [sums[i] for i in reached]), strict=True):
                for i, (part, grad) in enumerate(zip(of_towers, cut, strict=True)):
                    rows[i].append(part)
                    of_rows[i].append(grad)
    by_tower = [
        tower.weight_gradients(
            [loss.value, *rows[i]], [scale * tf.cast(shares[i], scale.dtype), *of_rows[i]], variables
        )
        for i, (tower, loss) in enumerate(zip(towers, losses, strict=True))
    ]
    if all(grad is None for grads in by_tower for grad in grads):
        raise errors.ConfigError(
            f"tower_step yields a Loss that depends on none of its {len(variables)} variables. What was computed "
            "before the last yield of a Loss or a Once is a constant after it: compute the loss anew, or yield the "
            "two losses in one list."
        )
    with tf.device(HOST):
        return _total(meeting, [list(zip(grads, variables, strict=True)) for grads in by_tower])


def _shares(meeting: Meeting, losses: Sequence[Loss]) -> list[tf.Tensor]:
    """Returns the towers' parts of the whole batch's loss."""
    there, total = [tower.part.examples for tower in meeting.towers], meeting.towers[0].part.total
    if losses[0].examples is not None and not meeting.is_alone:
        counted = [tf.cast(loss.examples, total.dtype) for loss in losses]
        there = [tf.where(examples > 0, each, 0) for examples, each in zip(there, counted, strict=True)]
        [total] = meeting.exchange([(Kind.SUM, tf.add_n(there))])
    return [tf.math.divide_no_nan(each, total) for each in there]


def _times(grad, share: tf.Tensor):
    return None if grad is None else tf.convert_to_tensor(grad) * tf.cast(share, grad.dtype)


def _sum(grads: Sequence):
    """Adds gradients, those of float16 as if without rounding in between; None if there are none."""
    there = [grad for grad in grads if grad is not None]
    if len(there) < 2 or there[0].dtype != tf.float16:
        return tf.add_n(there) if there else None
    return tf.cast(tf.add_n([tf.cast(grad, tf.float32) for grad in there]), tf.float16)


def _cut(meeting: Meeting, rows: Sequence[Sequence[tf.Tensor]], sums: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Cuts gradients by joined tensors into those by the towers' rows of them.

    Args:
      meeting: of the towers.
      rows: over joined tensors, over towers.
      sums: over joined tensors, the sums of these towers' gradients by them.

    Returns:
      The gradients, ordered like `rows`.
    """
    counts = [[tf.shape(each)[0] for each in meeting.rows(of_towers)] for of_towers in rows]
    before = meeting.exchange([(Kind.BEFORE, tf.add_n(count)) for count in counts])
    wholes = meeting.exchange([(Kind.SUM, grad) for grad in sums])
    return [_cut_one(*each) for each in zip(rows, counts, before, wholes, strict=True)]


def _cut_one(rows: Sequence[tf.Tensor], counts: Sequence, begin: tf.Tensor, whole: tf.Tensor) -> list[tf.Tensor]:
    """Cuts one gradient: the towers' rows, and how many of them are in the whole, from a place on."""
    cut = []
    for part, size in zip(rows, counts, strict=True):
        missing = tf.zeros(tf.concat([[tf.shape(part)[0] - size], tf.shape(part)[1:]], 0), whole.dtype)
        cut.append(tf.concat([whole[begin : begin + size], missing], axis=0))
        begin += size
    return cut


def _total(meeting: Meeting, tower_grads: list[GradientsAndVariables]) -> GradientsAndVariables:
    """Returns the sums over the towers of all processes, with the slices that one device would have."""
    means = gradients.average_gradients(tower_grads)  # names variables without gradients
    if meeting.is_alone:
        return means
    of_variable = [{id(variable): grad for grad, variable in grads} for grads in tower_grads]
    by_tower = [[grads[id(variable)] for grads in of_variable] for _, variable in means]
    rows = [_rows(grads[0]) for grads in by_tower]
    pairs = list(zip(rows, by_tower, strict=True))
    wholes = iter(meeting.exchange([sent for each in pairs for sent in _sent(*each)]))
    in_float16, total = _computed_in_float16(meeting.model), []
    for (kind, grads), (_, variable) in zip(pairs, means, strict=True):
        whole = next(wholes)
        if kind is _Rows.ALL and id(variable) in in_float16:  # one device sums in float16, where the sum may overflow
            whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
        elif kind is not _Rows.ALL:
            indices = grads[0].indices if kind is _Rows.SAME else next(wholes)
            whole = tf.IndexedSlices(whole, indices, grads[0].dense_shape)
        total.append((_with_rows_once(whole) if kind is _Rows.ONCE else whole, variable))
    return total


class _Rows(enum.Enum):
    """The rows of a variable that the towers' gradients have."""

    ALL = enum.auto()
    SAME = enum.auto()  # of slices that are not of examples, such as positions': the same in each tower
    ONCE = enum.auto()  # each at most once, as in a sparse input's product with a kernel
    EACH = enum.auto()  # once for each of its uses by an example


def _rows(grad) -> _Rows:
    if not isinstance(grad, tf.IndexedSlices):
        return _Rows.ALL
    if tf.executing_eagerly():
        return _Rows.EACH
    op = grad.indices.op
    while op.type in ("Reshape", "Identity", "Cast"):
        op = op.inputs[0].op
    if op.type == "Unique":
        return _Rows.ONCE
    return _Rows.EACH if _depends_on_data(grad.indices) else _Rows.SAME


def _depends_on_data(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of a step is computed of more than constants and the shapes of others."""
    constants = {id(inside) for outside, inside in getattr(tensor.graph, "captures", ()) if hasattr(outside, "numpy")}
    ahead, seen = [tensor], set()
    while ahead:
        tensor = ahead.pop()
        op = tensor.op
        if op.type == "Placeholder" and (id(tensor) not in constants or tensor.dtype == tf.resource):
            return True
        if op not in seen and op.type not in ("Shape", "ShapeN", "Size"):
            seen.add(op)
            ahead += op.inputs
    return False


def _sent(kind: _Rows, grads: Sequence) -> list[tuple[Kind, tf.Tensor]]:
    if kind is _Rows.ALL:
        return [(Kind.SUM, tf.add_n([tf.convert_to_tensor(grad) for grad in grads]))]
    if kind is _Rows.SAME:
        return [(Kind.SUM, tf.add_n([grad.values for grad in grads]))]
    return [
        (Kind.ROWS, tf.concat([grad.values for grad in grads], axis=0)),
        (Kind.ROWS, tf.concat([grad.indices for grad in grads], axis=0)),
    ]


def _with_rows_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the slices of each row: to an optimizer such as Adam two of them are not their sum."""
    rows, places = tf.unique(slices.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows)), rows, slices.dense_shape
    )


def _computed_in_float16(model: keras.Model) -> set[int]:
    """Returns the ids of weights whose innermost layer computes in float16."""
    dtypes = {id(v): layer.compute_dtype for layer in compat.sublayers(model) for v in layer.trainable_weights}
    return {key for key, dtype in dtypes.items() if dtype == "float16"}
