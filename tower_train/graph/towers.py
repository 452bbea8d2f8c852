"""One tower's network and loss, and the custom getters of its variables."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors, user_functions
from tower_train.examples import Examples, Mixed, Tensors, Weighted
from tower_train.graph import context
from tower_train.measures import classification_metrics, softmax_cross_entropy
from tower_train.workload import Workload

v1 = tf.compat.v1


def variable_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of variables, gradients and losses: that of the arithmetic, but never below float32.

    A step's change of a weight is mostly too small for bfloat16 and float16 (Micikevicius et al. 2018, "Mixed precision
    training", section 3.1).
    """
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def tower_outputs(workload: Workload, features: Tensors, dtype: tf.DType, training: bool) -> Tensors:
    """Returns one tower's outputs, in the scopes it is called in.

    Args:
      workload: its inference.
      features: [tower_batch, ...]; floating-point ones are cast to dtype.
      dtype: of the arithmetic; the outputs are in variable_dtype(dtype).
      training: for `inference`.
    """
    with context.entered(dataclasses.replace(context.current(), dtype=dtype)):
        outputs = user_functions.call(workload, "inference", _cast_floating(features, dtype), training)
    return _cast_floating(outputs, variable_dtype(dtype))


def tower_loss(
    workload: Workload, features: Tensors, labels: Tensors | Weighted | Mixed, dtype: tf.DType,
    class_weights: np.ndarray | None = None,
) -> tuple[Tensors, tf.Tensor]:  # fmt: skip
    """Returns one tower's (outputs, loss) in training; GraphError if a function returned what it may not.

    Args:
      workload: inference and loss.
      features, dtype: as for `tower_outputs`.
      labels: [tower_batch, ...].
      class_weights: [classes], factors of the examples' weights.
    """
    outputs = tower_outputs(workload, features, dtype, training=True)
    losses = [
        loss_of(workload, outputs, _weighted(workload, part, class_weights, variable_dtype(dtype)))
        for part in (labels if isinstance(labels, Mixed) else [labels])
    ]
    return outputs, losses[0] if len(losses) == 1 else tf.add_n(losses)


def _weighted(
    workload: Workload, labels: Tensors | Weighted, class_weights: np.ndarray | None, dtype: tf.DType
) -> Weighted:
    """Returns labels with the weights of their examples times those of their classes."""
    labels, weights = Weighted.of(labels)
    if class_weights is not None:
        if not tf.is_tensor(labels) or not labels.dtype.is_integer or labels.shape.rank != 1:
            raise errors.GraphError(
                f"--class_weight: the labels of workload {workload.name} are no classes, whole numbers [batch]. Leave "
                "the option out, and weigh examples by tower_train.Weighted(labels, weights) as labels."
            )
        of_classes = tf.gather(tf.constant(class_weights, dtype), tf.cast(labels, tf.int64))
        weights = of_classes if weights is None else of_classes * tf.cast(weights, of_classes.dtype)
    return Weighted(labels, weights)


def loss_of(workload: Workload, outputs: Tensors, labels: Tensors | Weighted) -> tf.Tensor:
    """Returns the workload's loss; GraphError if it takes no weights and the labels have some."""
    labels, weights = Weighted.of(labels)
    if hasattr(workload.loss, "reduction"):  # one of keras.losses, which computes in float32 whatever it is given
        dtype = next(t.dtype.name for t in tf.nest.flatten(outputs) if t.dtype.is_floating)
        loss = copy.copy(workload.loss)
        loss._dtype = dtype  # read by Keras at each call; of its own losses only the constructor takes it
        workload = dataclasses.replace(workload, loss=loss)
        return user_functions.call(workload, "loss", labels, outputs, sample_weight=weights)
    return user_functions.call(workload, "loss", outputs, labels, **({} if weights is None else {"weights": weights}))


def check_classes(workload: Workload, examples: Examples, outputs: Tensors, function: Callable) -> None:
    """Raises GraphError for fewer outputs than classes, if `function` is the trainer's own for classes."""
    if not is_of_classes(function):
        return
    num_outputs, names = outputs.shape[-1], examples.class_names
    greatest = -1 if names or examples.labels is None else int(examples.labels.max())
    if num_outputs is not None and num_outputs < max(len(names), greatest + 1):
        shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        wanted = f"{len(names)} classes ({shown})" if names else f"labels up to {greatest}"
        at = "" if names else f" (label number {int(examples.labels.argmax())} is {greatest})"
        raise errors.GraphError(
            f"{examples.name} has {wanted}, but the network of workload {workload.name} gives {num_outputs} "
            f"output{'s' * (num_outputs != 1)}{at}. Let `inference` return one for each class."
        )


def last_activation(outputs: Tensors) -> tf.Operation | None:
    """Returns the softmax or sigmoid by which a network ends, if it does."""
    op = outputs.op if tf.is_tensor(outputs) else None
    while op and op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return op if op and op.type in ("Softmax", "Sigmoid") else None


def activation_notes(workload: Workload, outputs: Tensors) -> list[str]:
    """Warns of a loss that takes logits where the network ends by a softmax or sigmoid, and of the contrary."""
    last, loss = last_activation(outputs), workload.loss
    takes_logits = getattr(loss, "from_logits", True if is_of_classes(loss) else None)
    if takes_logits and last:
        return [
            f"*** network: it ends by a {last.type.lower()}, but the loss takes logits, the numbers before it: it will "
            "learn slowly and badly. Leave the activation of the last layer out."
        ]
    if takes_logits is False and not last and tf.is_tensor(outputs):
        return ["*** network: it ends without a softmax or sigmoid, but the loss takes probabilities: give it "
                "from_logits=True."]  # fmt: skip
    return []


def is_of_classes(function: Callable) -> bool:
    """Returns whether a function is the trainer's own loss or metrics for classes."""
    return getattr(function, "func", function) in (softmax_cross_entropy, classification_metrics)


def _cast_floating(tensors: Tensors, dtype: tf.DType) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, tensors)


def kept_in_full_precision(getter, name, shape=None, dtype=tf.float32, initializer=None, *args, **kwargs):
    """Gets a copy of a float32 variable for a network that asks for one below float32; a custom getter."""
    dtype = tf.as_dtype(dtype)
    if initializer is not None and not callable(initializer):  # a value, whose dtype is that of the variable
        value = tf.convert_to_tensor(initializer)
        dtype, initializer = value.dtype, tf.cast(value, variable_dtype(value.dtype))
    variable = getter(name, shape, variable_dtype(dtype), initializer, *args, **kwargs)
    if variable.dtype.base_dtype == dtype:
        return variable
    return tf.cast(variable, dtype)


def seeded(seed: int):
    """Returns a custom getter that seeds initializers by name: default seeds depend on the number of ops and towers."""

    def with_seed(getter, name, shape=None, dtype=None, initializer=None, *args, **kwargs):
        if initializer is None and tf.as_dtype(dtype).is_floating:
            initializer = v1.glorot_uniform_initializer()  # get_variable's own default for floating-point variables
        if isinstance(initializer, type):
            initializer = initializer()
        of_keras = getattr(initializer, "_init_seed", 0) is None
        if of_keras or getattr(initializer, "seed", 0) is None:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            number = int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
            if of_keras or hasattr(initializer, "_random_generator"):  # they have made numbers of a seed already
                initializer = type(initializer).from_config(initializer.get_config() | {"seed": number})
            else:
                initializer = copy.copy(initializer)  # the caller may share it between variables
                initializer.seed = number
        return getter(name, shape, dtype, initializer, *args, **kwargs)

    return with_seed
