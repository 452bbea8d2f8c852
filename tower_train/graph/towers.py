"""tower_loss: one replica of the network per device, all on the same variables or on copies of them."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tower_train import errors, initializers
from tower_train.graph.mirrors import Copies
from tower_train.workload import Tensors, Workload

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Tower:
    """One replica.

    Attributes:
      name: 'tower_0', ...: its name scope.
      device: where it computes.
      outputs: what inference returned, or its mean over views.
      labels: its labels [tower_batch, ...].
      loss: scalar, the mean over its own examples. None in a tower built without loss.
    """

    name: str
    device: str
    outputs: Tensors
    labels: Tensors
    loss: tf.Tensor | None


def variable_dtype(dtype: tf.DType) -> tf.DType:
    """The dtype of variables, gradients and losses: that of the arithmetic, but never below float32.

    A step's change of a weight is mostly too small for bfloat16's eight bits (Micikevicius et al. 2018, "Mixed
    precision training", section 3.1).
    """
    return tf.float32 if dtype == tf.bfloat16 else dtype


def tower_loss(workload: Workload, features: Tensors, labels: Tensors, dtype: tf.DType, training: bool) -> tuple:
    """One replica's (outputs, loss), in the scopes it is called in.

    Args:
      workload: inference and loss.
      features, labels: [tower_batch, ...]; floating-point features are cast to dtype.
      dtype: of the arithmetic; the outputs and the loss are in variable_dtype(dtype).
      training: False leaves the loss out (None), and takes the mean over the workload's views.

    Raises:
      GraphError: the loss is not a scalar, or the views cannot be averaged.
    """

    def network(features: Tensors) -> Tensors:
        return _cast_floating(workload.inference(_cast_floating(features, dtype), training), variable_dtype(dtype))

    if not training:
        return (_mean_over_views(workload, network, features) if workload.views else network(features)), None
    outputs = network(features)
    loss = workload.loss(outputs, labels)
    if loss.shape.rank != 0:
        raise errors.GraphError(
            f"workload {workload.name}: loss returned shape {loss.shape}; it must be a scalar, "
            "the mean over the batch it was given. Reduce it with tf.reduce_mean."
        )
    return outputs, loss


def _mean_over_views(workload: Workload, network: Callable[[Tensors], Tensors], features: Tensors) -> Tensors:
    """The weighted mean of what the network makes of each view.

    Raises:
      GraphError: the weights do not sum to 1, or the network's outputs are not floating point.
    """
    weights, views = zip(*workload.views(features), strict=True)
    if abs(sum(weights) - 1) > 1e-6:
        raise errors.GraphError(
            f"workload {workload.name}: the weights of its views are {', '.join(f'{weight:g}' for weight in weights)}, "
            f"which sum to {sum(weights):g}. They must sum to 1."
        )

    def mean(*outputs: tf.Tensor) -> tf.Tensor:
        if not outputs[0].dtype.is_floating:
            raise errors.GraphError(
                f"workload {workload.name}: outputs of dtype {outputs[0].dtype.name} have no mean over views. Let "
                "inference return floating-point outputs, or leave `views` out."
            )
        # One sum, and no chain of products and sums that TensorFlow rearranges otherwise in another graph.
        factors = tf.reshape(tf.constant(weights, outputs[0].dtype), [-1] + [1] * outputs[0].shape.rank)
        return tf.reduce_sum(tf.stack(outputs) * factors, axis=0)

    outputs = []
    with v1.name_scope("views"):
        for view in views:
            # One after the other: together they take twice the time on a CPU, and the memory of all their activations.
            with tf.control_dependencies([tensor.op for tensor in tf.nest.flatten(outputs[-1:])]):
                view = tf.nest.map_structure(tf.identity, view)
            outputs.append(network(view))
        return tf.nest.map_structure(mean, *outputs)


def build_towers(
    workload: Workload,
    batches: Iterable,
    devices: tuple[str, ...],
    dtype: tf.DType,
    seed: int = 0,
    training: bool = True,
    copies: Copies | None = None,
) -> Iterator[Tower]:
    """One tower a device: tower 0 creates the variables, later towers reuse them, or get copies of them.

    A tower is built when it is asked for, and its batch is asked for then.

    Args:
      workload: what a tower computes.
      batches: over towers, (features, labels).
      devices: over towers, a device string; where it is the same, towers share the device.
      dtype: of the arithmetic.
      seed: of the variables' initial values, which depend on it and on their names only.
      training: whether towers have a loss.
      copies: where the variables live; None: on the CPU, for all towers.

    Yields:
      The towers.

    Raises:
      GraphError: a later tower would create a variable; the message names it.
    """
    copies = copies or Copies()
    for i, (device, (features, labels)) in enumerate(zip(devices, batches, strict=True)):
        name = f"tower_{i}"
        copies.prepare(i)
        with (
            tf.device(device),
            v1.name_scope(f"{name}/"),
            tf.variable_creator_scope(copies.create if i == 0 else _refused(name)),
            v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE, custom_getter=copies.getter(i)),
            v1.variable_scope(v1.get_variable_scope(), custom_getter=_seeded(seed) if training else _restored),
            v1.variable_scope(v1.get_variable_scope(), custom_getter=_kept_in_full_precision),
        ):
            outputs, loss = tower_loss(workload, features, labels, dtype, training)
        yield Tower(name, device, outputs, labels, loss)


def _cast_floating(tensors: Tensors, dtype: tf.DType) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, tensors)


def _kept_in_full_precision(getter, name, shape=None, dtype=tf.float32, *args, **kwargs):
    """A custom getter: a network that asks for a bfloat16 variable gets a bfloat16 copy of a float32 one."""
    dtype = tf.as_dtype(dtype or tf.float32)
    variable = getter(name, shape, variable_dtype(dtype), *args, **kwargs)
    return variable if variable.dtype.base_dtype == dtype else tf.cast(variable, dtype)


def _refused(tower: str):
    def refuse(create, **kwargs):
        raise errors.GraphError(
            f"{tower} would create the variable {kwargs.get('name')!r}, which tower_0 did not create. Create variables "
            "with tf.compat.v1.get_variable under names that are the same in every call of inference and loss."
        )

    return refuse


def _restored(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
    """A custom getter for a network whose values come from a checkpoint: it needs no training examples for them, and an
    exported one no Python."""
    if isinstance(initializer, initializers.FromExamples):
        initializer = v1.zeros_initializer()
    return getter(name, shape, dtype, initializer, *args, **kwargs)


def _seeded(seed: int):
    """A custom getter that seeds initializers by variable name: an op's own default seed would depend on how many
    ops, and so towers, were built before it."""

    def seeded(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
        if initializer is None and tf.as_dtype(dtype or tf.float32).is_floating:
            initializer = v1.glorot_uniform_initializer()  # get_variable's own default for floating-point variables
        if isinstance(initializer, type):
            initializer = initializer()
        if getattr(initializer, "seed", 0) is None:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            initializer = copy.copy(initializer)  # the caller may share it between variables
            initializer.seed = int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
        return getter(name, shape, dtype, initializer, *args, **kwargs)

    return seeded
