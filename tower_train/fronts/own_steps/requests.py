"""What a model's `tower_step` yields: all that concerns more than one tower."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """Asks for an update: the mean over the towers of this loss's gradients, applied once.

    What comes after the yield sees the new values. A list of losses is computed on the same weights, and applied in
    its order.

    Attributes:
      value: floating-point scalar, a mean over the tower's examples.
      variables: that are trained, trainable weights of the model; None: all of them.
      optimizer: None: the one that the model was compiled with.
      examples: number or scalar, what `value` is the mean over in this tower, such as its tokens that are not masked;
        None: the tower's examples. It weighs towers against each other.
    """

    value: tf.Tensor
    variables: Sequence[keras.Variable] | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    examples: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
    """Asks for the rows of all towers: the yield gives the tensors of the global batch, in its order.

    Gradients go through it to the towers that the rows come from.

    Attributes:
      tensors: a tensor [rows, ...] or a structure of them.
    """

    tensors: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Once:
    """Asks that a function is called once and not in every tower, such as one that assigns to variables.

    What comes after the yield sees the new values; the yield gives what the function returns.

    Attributes:
      function: without arguments; what it uses of the towers is the first tower's, or from a Join.
    """

    function: Callable[[], Any]
