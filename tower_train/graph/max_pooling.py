"""The gradient of max pooling in towers that XLA compiles."""

import itertools
import math

import tensorflow as tf

GRADIENT = "TowerTrainMaxPool"  # its name for tf.Graph.gradient_override_map
_LARGEST_WINDOW = 25  # pixels, each of which takes some operations


@tf.RegisterGradient(GRADIENT)
def _max_pool_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of a max pooling: of equal greatest values the first has it, by rows, as on CPUs. XLA's own
    operation, select-and-scatter, which large windows still get, takes longer and gives it to another of them."""
    maps, pooled = op.inputs[0], op.outputs[0]
    known = {name: op.get_attr(name) for name in ("ksize", "strides", "padding", "data_format")}
    (_, height, width, _), (_, down, right, _) = known["ksize"], known["strides"]
    is_of_images = known["ksize"][::3] == known["strides"][::3] == [1, 1] and known["data_format"] == b"NHWC"
    if not is_of_images or known["padding"] == b"EXPLICIT" or height * width > _LARGEST_WINDOW:
        known |= {"explicit_paddings": op.get_attr("explicit_paddings")}
        return tf.raw_ops.MaxPoolGrad(orig_input=maps, orig_output=pooled, grad=upstream, **known)
    batch, rows, columns, channels = tf.unstack(tf.shape(pooled))
    to_last = tf.stack([(rows - 1) * down, (columns - 1) * right])  # from the first window to the last
    missing = to_last + [height, width] - tf.shape(maps)[1:3]  # less than 0: pixels that no window has
    before = tf.maximum(missing, 0) // 2
    around = tf.stack([before, tf.maximum(missing, 0) - before], 1)
    padded = tf.pad(maps, _of_pixels(around), constant_values=tf.constant(-math.inf, maps.dtype))
    places = list(itertools.product(range(height), range(width)))  # in a window

    def at(row: int, column: int) -> tf.Tensor:  # that value of each window
        return padded[:, row : row + to_last[0] + 1 : down, column : column + to_last[1] + 1 : right]

    greatest, first = at(0, 0), tf.zeros(tf.shape(pooled), tf.int32)
    for number, place in enumerate(places[1:], 1):
        is_greater = at(*place) > greatest
        greatest, first = tf.where(is_greater, at(*place), greatest), tf.where(is_greater, number, first)

    def spread(number: int, place: tuple[int, int]) -> tf.Tensor:  # over the pixels that windows cover
        part = tf.where(tf.equal(first, number), upstream, tf.zeros([], upstream.dtype))
        part = tf.reshape(part, [batch, rows, 1, columns, 1, channels])
        part = tf.pad(part, [[0, 0], [0, 0], [0, down - 1], [0, 0], [0, right - 1], [0, 0]])
        part = tf.reshape(part, [batch, rows * down, columns * right, channels])
        after = [height - 1 - place[0], width - 1 - place[1]]
        return tf.pad(part[:, : to_last[0] + 1, : to_last[1] + 1], _of_pixels(tf.stack([place, after], 1)))

    gradient = tf.pad(
        tf.add_n([spread(number, place) for number, place in enumerate(places)]),
        _of_pixels(tf.stack([[0, 0], tf.maximum(-missing, 0)], 1)),
    )
    last = before + tf.shape(maps)[1:3]
    return tf.ensure_shape(gradient[:, before[0] : last[0], before[1] : last[1]], maps.shape)


def _of_pixels(paddings: tf.Tensor) -> tf.Tensor:
    """Returns the paddings of images, from those of their rows and columns [2, 2]."""
    return tf.concat([[[0, 0]], paddings, [[0, 0]]], 0)
