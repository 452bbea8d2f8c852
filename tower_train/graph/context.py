"""The record through which layers and the training graph know each other.

The training graph enters it for each tower that it builds; layers look at `current()`, which is empty elsewhere, such
as in evaluation.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train.graph.batch_axis import Axes, Axis
from tower_train.graph.draws import Draws


class Statistic(NamedTuple):
    """A value that a tower computed from its batch, for a variable that follows the mean over towers."""

    moving: tf.Variable  # the variable, or this tower's copy of it
    value: tf.Tensor  # of this step; the shape and dtype of `moving`
    momentum: float  # moving = momentum * moving + (1 - momentum) * mean of the towers' values
    is_averaged: bool = True  # has a moving average, as weights have (see normalization.moving_collections)

    @property
    def is_mean(self) -> bool:
        """False for integers, such as counters, which are the same in all towers."""
        return self.value.dtype.is_floating  # their mean would be no integer


class ParamGroup(NamedTuple):
    """The rate of a variable, by all blocks of layers.param_group around its creation."""

    rate_factor: float = 1.0  # multiplies the learning rate
    until_epoch: float = math.inf  # number of epochs after which the rate is 0
    muon: bool = True  # False: --optimizer=muon moves it by momentum, whatever its rank
    momentum: float | None = None  # None: --momentum
    from_epoch: float = 0.0  # number of epochs before which the rate is 0


@dataclasses.dataclass(frozen=True)
class Context:
    """The tower that is being built."""

    tower: int = 0  # its index within this worker; 0 in programs whose towers meet
    towers: int = 1  # number of towers, over all workers, that compute at a time and so normalise together
    turn: int = 0  # of the tower on its device, 0 for the first
    by_tower: bool = False  # each normalises by its own batch all the same
    # in programs whose towers meet: tensors -> their means over all towers, differentiable; None: by collectives
    mean: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]] | None = None
    graph: tf.Graph | None = None  # of the tower; None outside of towers
    batch: int | None = None  # examples of the tower; None outside of towers
    batch_axes: Axes = dataclasses.field(default_factory=dict)  # known ones, see batch_axis.py
    epochs_seen: tf.Tensor | None = None  # before this step, float64 scalar; None when nothing is trained
    dtype: tf.DType = tf.float32  # of the arithmetic, for networks without floating-point features
    frozen: bool = False  # new variables are not trained
    statistics: list[Statistic] | None = None  # of the tower's batch; None outside of a tower that is trained
    normalized: list[str] = dataclasses.field(default_factory=list)  # names of tensors normalised by the batch
    # {variable's name: its group}, of the variables created in blocks of layers.param_group
    param_groups: dict[str, ParamGroup] = dataclasses.field(default_factory=dict)
    draws: Draws | None = None  # the random numbers of its layers; None where examples have no positions
    builds_keras: bool = False  # a Keras model is being built, whose variables do not come from get_variable

    def enter_tower(self, index: int = 0, draws: Draws | None = None, turn: int = 0, inputs: Sequence[tf.Tensor] = ()):
        """Enters the context of the trained tower that comes `index` after this one. inputs: its examples."""
        batches = {size for tensor in inputs if (size := tensor.shape[:1].num_elements())}  # scalars have none
        tower = dataclasses.replace(
            self,
            tower=self.tower + index,
            turn=turn,
            batch=max(batches, default=None),
            draws=draws,
            batch_axes={tensor.name: Axis() for tensor in inputs},
            graph=tf.compat.v1.get_default_graph(),
            normalized=[],
            statistics=None if self.mean else [],  # towers that meet assign their mean at once
        )
        return entered(tower)


# not a global: Keras' and Estimators' towers are built in threads, each with its own
_CURRENT: contextvars.ContextVar[Context | None] = contextvars.ContextVar("tower_train_context", default=None)


def current() -> Context:
    """Returns the context of the tower that is being built; an empty one outside of towers."""
    return _CURRENT.get() or Context()  # so that layers also work without any tower, as in a notebook


@contextlib.contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Makes this the current context within the block."""
    token = _CURRENT.set(context)  # blocks may be nested, as layers.frozen in a tower
    try:
        yield context
    finally:
        _CURRENT.reset(token)
