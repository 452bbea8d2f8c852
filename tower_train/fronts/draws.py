"""Random numbers of keras.random and tf.random, drawn for the whole batch: each tower takes its rows."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, meeting, parts
from tower_train.fronts.parts import Cut, Size
from tower_train.graph import context, xla
from tower_train.graph.batch_axis import Axis

Drawn = tuple[tf.Tensor, Callable]  # a tower's rows of a larger draw, and a function that draws them as usual
Joined = tuple[Size, Size, tf.Tensor]  # a tower's number of rows, that of all towers, and the indices of the tower's

_OF_NO_ROWS = ("beta", "binomial", "categorical", "gamma", "shuffle")  # of keras.random


@contextlib.contextmanager
def drawn_for_more(
    cuts: Sequence[Cut],
    batch,
    names_all: bool,
    is_off: Callable[[], bool] = lambda: False,
    joins: bool = False,
) -> Iterator[list[Drawn]]:
    """Makes keras.random and tf.random draw in a tower within this block for the rows of all towers, from the same
    seeds, and keeps the tower's rows.

    Args:
      cuts: of the tensors of the tower's batch; none if it is alone.
      batch: the tower's.
      names_all: whether a number of rows in the program may be the whole batch's.
      is_off: tells whether to draw as usual now, such as for initial values.
      joins: whether the program may draw for tensors of different numbers of rows, one after the other in their order.

    Yields:
      A list that collects these draws.
    """
    cut, op_seeds, lengths = [], itertools.count(), parts.lengths(batch) if cuts else []
    rows = functools.partial(_rows_of_draw, cuts, lengths, _joined_rows(cuts) if joins else None)

    def draw(function, given):
        with xla.not_compiled():
            return drawn(function, given)

    def drawn(function, given):
        name = function.__name__
        if cuts and name in _OF_NO_ROWS:
            raise errors.ConfigError(
                f"keras.random.{name} is called, which towers cannot draw as one device does. Draw with "
                "keras.random.normal, uniform, truncated_normal, randint or dropout, make the numbers a part of the "
                "data, or train on one device."
            )
        if meeting.current() is None or is_off() or name in _OF_NO_ROWS:
            return function(**given)
        if isinstance(given.get("seed2"), compat.NoSeed):
            given["seed"], given["seed2"] = tf.compat.v1.get_seed(next(op_seeds))  # never (0, 0), which is at random
        if name == "dropout":
            return _dropped(rows, function, given)
        shape = given["shape"]
        known = tf.get_static_value(shape, partial=True) if tf.is_tensor(shape) else shape
        known = [None] * (tf.compat.dimension_value(shape.shape[0]) or 0) if known is None else known
        sizes = [shape[i] if size is None else size for i, size in enumerate(known)]
        size = sizes[0] if sizes and tf.is_tensor(sizes[0]) else int(sizes[0]) if sizes else None
        is_of_numbers = not tf.is_tensor(shape) or (not hasattr(shape, "numpy") and shape.op.type == "Const")
        chosen = None if size is None else rows(size, names_all and isinstance(size, int) and is_of_numbers)
        if chosen is None:
            return function(**given)
        more = function(**given | {"shape": (chosen[0], *sizes[1:])})
        kept = tf.gather(more, chosen[1])
        # so that what is made of them is normalised over all towers too
        context.current().batch_axes[kept.name] = Axis()
        # A draw with a state of its own would come to other numbers in the next step; others begin with the same.
        has_state = "seed2" in given
        cut.append((kept, functools.partial(function, **given) if has_state else lambda: more[: tf.shape(kept)[0]]))
        return kept

    with compat.drawn_by(draw):
        yield cut


def draw_whole(needed: Collection[tf.Operation], drawn: Sequence[Drawn]) -> None:
    """Undoes cuts for operations that need draws of no examples: their size just equalled a batch's."""
    for kept, draw in drawn:
        if kept.op in needed:
            whole = draw()
            for consumer in kept.consumers():
                for i in [i for i, tensor in enumerate(consumer.inputs) if tensor is kept and consumer in needed]:
                    compat.set_input(consumer, i, whole)


def _dropped(rows: Callable, dropout: Callable, given: dict) -> tf.Tensor:
    """Multiplies inputs by what the dropout of more rows leaves of ones."""
    inputs, noise_shape = given["inputs"], given["noise_shape"]
    sizes = [tf.shape(inputs)[i] if size is None else size for i, size in enumerate(inputs.shape)]
    is_shared = noise_shape is not None and isinstance(noise_shape[0], int) and noise_shape[0] == 1
    chosen = rows(sizes[0], False) if 0 < given["rate"] < 1 and not is_shared else None
    if chosen is None:
        return dropout(**given)
    ones = tf.ones((chosen[0], *sizes[1:]), inputs.dtype)
    kept = dropout(**given | {"inputs": ones, "noise_shape": noise_shape and (None, *noise_shape[1:])})
    return inputs * tf.gather(kept, chosen[1])


def _rows_of_draw(
    cuts: Sequence[Cut], lengths: Sequence[Size], joined: Joined | None, size: Size, is_number: bool
) -> tuple[Size, tf.Tensor] | None:
    """Chooses a tower's rows of random numbers that are drawn for the whole batch.

    Args:
      cuts: of the tower's tensors.
      lengths: of their sequences.
      joined: of the tower's tensors together, if the program may draw for them so.
      size: the rows that the tower draws: by example if they are a multiple of a tensor's, as those of several
        consecutive batches, or first as those of a sequence's elements, [batch * time].
      is_number: whether the program gives it as a number: that may be the whole batch's.

    Returns:
      The rows to draw for all towers, and the indices of this one's; None if a fixed size is of no example. A varying
      one gets numbers of the tower's own.
    """
    for each in cuts if is_number else ():
        if isinstance(each.batch, int) and 0 < each.batch == size != each.rows:
            return size, tf.range(each.begin, each.begin + each.rows)
    is_static = isinstance(size, int)
    if is_static and joined and isinstance(joined[0], int) and joined[0] == size:  # of tensors == makes an op
        return joined[1:]
    cuts = [*(Cut(*(length * each for each in rows)) for length in lengths for rows in cuts), *cuts]
    cuts = [each for each in cuts if not is_static or isinstance(each.rows, int) and size % each.rows == 0]
    if not cuts:
        return None
    chosen, rows = cuts[0], tf.range(size)
    for each in reversed(cuts):
        fits = tf.equal(size % each.rows, 0)  # in an Estimator's graph == compares objects
        chosen = each if is_static else Cut(*(tf.where(fits, *pair) for pair in zip(each, chosen, strict=True)))
    kept = rows // chosen.rows * chosen.batch + chosen.begin + rows % chosen.rows
    total = (size + chosen.rows - 1) // chosen.rows * chosen.batch
    if is_static or joined is None:
        return total, kept
    return tf.cond(tf.equal(size, joined[0]), lambda: joined[1:], lambda: (total, kept))


def _joined_rows(cuts: Sequence[Cut]) -> Joined | None:
    """Returns a tower's rows of the tensors of a batch, each size once, one after the other; None if all have one."""
    known = [each[:3] for each in cuts]
    is_static = all(isinstance(size, int) for each in known for size in each)
    known = list(dict.fromkeys(known)) if is_static else known
    if len(known) < 2:
        return None
    table = tf.stack(list(map(tf.stack, known)))
    table = table if is_static else tf.raw_ops.UniqueV2(x=table, axis=[0]).y
    rows, begin, batch = tf.unstack(table, 3, axis=1)
    begin += tf.cumsum(batch, exclusive=True)
    kept = tf.ragged.range(begin, begin + rows).values
    if is_static:
        total, whole = (sum(sizes) for sizes in list(zip(*known, strict=True))[::2])
        return total, whole, tf.ensure_shape(kept, [total])
    total = tf.where(tf.size(rows) > 1, tf.reduce_sum(rows), -1)  # of one size the usual way does the same
    return total, tf.reduce_sum(batch), kept
