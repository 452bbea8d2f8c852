"""The requests of a model's `tower_step`: all that concerns more than one tower."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """Requests an update by the gradient of the whole batch's loss: the towers' mean, weighted by their examples.

    Code after the yield sees the new values. A list of losses is computed on the same weights, and applied in its
    order.

    Attributes:
      value: floating-point scalar, a mean over the tower's examples.
      variables: trainable weights of the model that are trained; None: all of them.
      optimizer: None: the one that the model was compiled with.
    """

    value: tf.Tensor
    variables: Sequence[keras.Variable] | None = None
    optimizer: keras.optimizers.Optimizer | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
    """Requests the rows of all towers: the yield gives the tensors of the global batch, in its order.

    Gradients go through it to the towers of the rows.

    Attributes:
      tensors: a tensor [rows, ...] or a structure of them.
    """

    tensors: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Once:
    """Requests that a function is called once and not in every tower, such as one that assigns to variables.

    Code after the yield sees the new values; the yield gives the function's result.

    Attributes:
      function: without arguments; values that it uses are the first tower's, or from a Join.
    """

    function: Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """The end of a step, with what it returned."""

    result: Any
