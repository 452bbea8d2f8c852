"""Summaries of a step for TensorBoard. Tags name variables and layers, never a tower."""

import itertools
import math

import tensorflow as tf

from tower_train.examples import Tensors
from tower_train.graph.gradients import GradientsAndVariables

v1 = tf.compat.v1

_TOWER = "tower_0/"  # whose summaries are shown
_IMAGES = 4  # shown of each batch
_MOST_VALUES = 2**16  # in a histogram
_MOST_CONSTANT_BYTES = 1024  # of a constant drawn with its value


def serialized_graph(graph: tf.Graph) -> bytes:
    """Serializes a graph for TensorBoard, without functions and the values of large constants, such as images."""
    drawn = graph.as_graph_def(add_shapes=True)
    drawn.ClearField("library")
    for tensor in (node.attr["value"].tensor for node in drawn.node if node.op == "Const"):
        if tensor.ByteSize() > _MOST_CONSTANT_BYTES:
            tensor.CopyFrom(type(tensor)(dtype=tensor.dtype, tensor_shape=tensor.tensor_shape))
    return drawn.SerializeToString(deterministic=True)


def step_summary(gradients: GradientsAndVariables, features: Tensors, update: tf.Operation) -> tf.Tensor:
    """Serializes one Summary of a step: histograms of the applied gradients and of variables after the update, some of
    the first tower's images (in its features), and the scalars and histograms of its network and loss."""
    parts = []
    for gradient, variable in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        parts.append(_histogram(f"{variable.op.name}/gradients", values))
    with tf.control_dependencies([update]):
        parts += [_histogram(v.op.name, v.read_value()) for v in v1.trainable_variables()]
    for images in filter(is_image, tf.nest.flatten(features)):
        parts.append(v1.summary.image("images", tf.cast(images[:_IMAGES], tf.float32), max_outputs=_IMAGES))
    for summary in v1.get_collection(v1.GraphKeys.SUMMARIES, scope=_TOWER):
        tag, values = tf.get_static_value(summary.op.inputs[0]), summary.op.inputs[-1]
        make = {"ScalarSummary": tf.raw_ops.ScalarSummary, "HistogramSummary": _histogram}.get(summary.op.type)
        if make and tag is not None:
            parts.append(make(tags=_once(tag.item().decode().removeprefix(_TOWER)), values=values))
    return v1.summary.merge(parts, collections=[])


def is_image(tensor: tf.Tensor) -> bool:
    """Returns whether a batch looks like one of images, [batch, height, width, channels]."""
    return tensor.shape.rank == 4 and tensor.shape[-1] in (1, 3, 4)


def _once(name: str) -> str:
    """Returns an op's name without repetitions of a scope, as in conv1/conv1."""
    return "/".join(part for part, _ in itertools.groupby(name.split("/")))


def _histogram(tags: str, values: tf.Tensor) -> tf.Tensor:
    # The op's name may not repeat the variable's, which the checkpoint reserves; the tag may.
    return tf.raw_ops.HistogramSummary(tag=tags, values=_finite(sample(values)), name=f"{tags}/histogram")


def sample(values: tf.Tensor) -> tf.Tensor:
    """Returns at most _MOST_VALUES of them, evenly spaced and from all channels alike, as sorting millions is slow."""
    size = values.shape.num_elements()
    if size is None or size <= _MOST_VALUES:
        return values
    stride = -(-size // _MOST_VALUES)
    # else each would be of the same few channels
    while math.gcd(stride, values.shape[-1]) > 1:
        stride += 1
    return tf.reshape(values, [-1])[::stride]


def _finite(values: tf.Tensor) -> tf.Tensor:
    """Removes NaN and Inf, at which HistogramSummary fails, hiding their source."""
    values = tf.reshape(values, [-1])
    # not tf.boolean_mask, whose dozen operations for each variable took a tenth of building a graph
    return tf.gather_nd(values, tf.where(tf.math.is_finite(values))) if values.dtype.is_floating else values
