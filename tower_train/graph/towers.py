"""One tower: the scope in which it is built, its network and its loss."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors, normalization, user_functions
from tower_train.examples import Examples, Mixed, Tensors, Weighted
from tower_train.graph import context, xla
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.step_plan import StepPlan
from tower_train.graph.variables import Variables, seeded, variable_dtype
from tower_train.measures import classification_metrics, softmax_cross_entropy
from tower_train.workload import Workload

v1 = tf.compat.v1


@contextlib.contextmanager
def tower_scope(
    plan: StepPlan, shared: context.Context, tower: Tower, variables: Variables, batch: Tensors, draws: Draws
) -> Iterator[context.Context]:
    """Builds a tower within this block: on its device, in its name scope, on these variables, with these random
    numbers. shared: what the contexts of all towers have in common."""
    normalization.replace_functions()  # tf.nn.moments and the like too, if they normalise a tower's batch
    inputs = tf.nest.flatten(batch, expand_composites=True)
    with (
        variables.tower(tower, seeded(plan.config.seed)),
        xla.compiled(plan.is_compiled, tower.device),
        shared.enter_tower(tower.index, draws, tower.turn, inputs) as entered,
    ):
        yield entered


def tower_outputs(workload: Workload, features: Tensors, dtype: tf.DType, training: bool) -> Tensors:
    """Returns one tower's outputs, in variable_dtype(dtype), from features [tower_batch, ...], of which floating-point
    ones are cast to the dtype of the arithmetic. training: for the workload's `inference`."""
    # in the context too, for networks whose features are integers
    with context.entered(dataclasses.replace(context.current(), dtype=dtype)):
        outputs = user_functions.call(workload, "inference", _cast_floating(features, dtype), training)
    return _cast_floating(outputs, variable_dtype(dtype))


def tower_loss(
    workload: Workload,
    features: Tensors,
    labels: Tensors | Weighted | Mixed,
    dtype: tf.DType,
    class_weights: np.ndarray | None = None,
) -> tuple[Tensors, tf.Tensor]:
    """Returns one tower's (outputs, loss) in training; GraphError if a function returned a wrong value.

    Args:
      workload, features, dtype: as for `tower_outputs`.
      labels: [tower_batch, ...].
      class_weights: [classes], factors of the examples' weights.
    """
    outputs = tower_outputs(workload, features, dtype, training=True)
    # mixed examples have two labels each, whose losses are weighed by their shares
    losses = [
        batch_loss(workload, outputs, _weighted(workload, part, class_weights, variable_dtype(dtype)))
        for part in (labels if isinstance(labels, Mixed) else [labels])
    ]
    return outputs, tf.add_n(losses)


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
        class_factors = tf.gather(tf.constant(class_weights, dtype), tf.cast(labels, tf.int64))
        weights = class_factors if weights is None else class_factors * tf.cast(weights, class_factors.dtype)
    return Weighted(labels, weights)


def batch_loss(workload: Workload, outputs: Tensors, labels: Tensors | Weighted) -> tf.Tensor:
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
    num_outputs = outputs.shape[-1]
    # labels without names may still be at hand, and count classes from 0
    num_labels = 0 if examples.labels is None else int(examples.labels.max()) + 1
    num_classes = len(examples.class_names) or num_labels
    if num_outputs is not None and num_outputs < num_classes:
        raise errors.GraphError(
            f"{examples.name} has {num_classes} classes, but the network of workload {workload.name} gives "
            f"{num_outputs} output{'s' * (num_outputs != 1)}. Let `inference` return one for each class."
        )


def last_activation(outputs: Tensors) -> tf.Operation | None:
    """Returns the softmax or sigmoid at the end of a network, if there is one."""
    op = outputs.op if tf.is_tensor(outputs) else None
    # casts and reshapes follow the activation, as in mixed precision
    while op and op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return op if op and op.type in ("Softmax", "Sigmoid") else None


def activation_notes(workload: Workload, outputs: Tensors) -> list[str]:
    """Warns of a loss on logits after a softmax or sigmoid, and of one on probabilities without."""
    last, loss = last_activation(outputs), workload.loss
    takes_logits = getattr(loss, "from_logits", True if is_of_classes(loss) else None)
    if takes_logits and last:
        return [
            f"*** network: it ends by a {last.type.lower()}, but the loss takes logits, the numbers before it: it will "
            "learn slowly and badly. Leave the activation of the last layer out."
        ]
    if takes_logits is False and not last and tf.is_tensor(outputs):
        return [
            "*** network: it ends without a softmax or sigmoid, but the loss takes probabilities: give it "
            "from_logits=True."
        ]
    return []


def is_of_classes(function: Callable) -> bool:
    """Returns whether a function is the trainer's own loss or metrics for classes."""
    return getattr(function, "func", function) in (softmax_cross_entropy, classification_metrics)


def _cast_floating(tensors: Tensors, dtype: tf.DType) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, tensors)
