"""The one record through which layers and the training graph know of each other.

The training graph enters it for each tower that it builds; layers look at `current()`. Outside of the towers of a
training graph, such as in evaluation, there is an empty one.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tower_train.graph.draws import TowerDraws


class Statistic(NamedTuple):
    """A value that one tower computed from its batch, for a variable that follows the mean over towers.

    Attributes:
      moving: the variable, or this tower's copy of it.
      value: of this step; the shape and dtype of `moving`.
      momentum: moving = momentum * moving + (1 - momentum) * mean of the towers' values.
      followed: whether `moving` has a moving average, as the weights have; it must be of
        layers.moving_collections(followed).
    """

    moving: tf.Variable
    value: tf.Tensor
    momentum: float
    followed: bool = True

    @property
    def is_mean(self) -> bool:
        """False for integers, such as counters, of which all towers have the same."""
        return self.value.dtype.is_floating


class Learning(NamedTuple):
    """Rate of a variable, by all blocks of layers.learning that it was created in.

    Attributes:
      rate_factor: multiplies the learning rate.
      until_epoch: the rate is 0 from when as many epochs have been seen.
      muon: False: --optimizer=muon moves it by momentum, whatever its rank.
    """

    rate_factor: float = 1.0
    until_epoch: float = math.inf
    muon: bool = True


class Trial(NamedTuple):
    """The tensors that a layer's algorithms are timed with.

    Attributes:
      shapes: of each tensor.
      dtype: of all of them.
      trained: over tensors, whether the gradient for it is wanted.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: tf.DType
    trained: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Context:
    """The tower that is being built.

    Attributes:
      tower: its index, over the towers of all workers.
      synchronized_towers: how many towers share batch statistics; 0: each has its own.
      epochs_seen: float64 scalar, the epochs seen before this step; None when nothing is trained.
      frozen: whether variables are created not to be trained.
      statistics: what this tower's layers note of its batch; None outside of a tower that is trained.
      learning: {variable's name: its rate}, of the variables created in blocks of layers.learning.
      draws: the random numbers of its layers; None where examples have no positions.
      drawn_by_tower: names of random numbers of its layers that depend on the towers all the same.
      common: {key: what `once` built} of towers that share cores; None where each tower builds its own.
      choose: chooses among a layer's algorithms: (site, algorithms, trial) -> name, as for layers.fastest; None where
        the first one is taken.
    """

    tower: int = 0
    synchronized_towers: int = 0
    epochs_seen: tf.Tensor | None = None
    frozen: bool = False
    statistics: list[Statistic] | None = None
    learning: dict[str, Learning] = dataclasses.field(default_factory=dict)
    draws: TowerDraws | None = None
    drawn_by_tower: set[str] = dataclasses.field(default_factory=set)
    common: dict[Hashable, Any] | None = None
    choose: Callable[[str, Mapping[str, Callable], "Trial"], str] | None = None

    def of_tower(self, index: int, draws: TowerDraws | None = None):
        """Enters the context of a tower that is trained: the one so many after this one's."""
        return entered(dataclasses.replace(self, tower=self.tower + index, statistics=[], draws=draws))


_CURRENT: contextvars.ContextVar[Context | None] = contextvars.ContextVar("tower_train_context", default=None)


def current() -> Context:
    """Returns the context of the tower that is being built; an empty one outside of towers."""
    return _CURRENT.get() or Context()


def once(key: Hashable, build: Callable[[], Any]) -> Any:
    """Returns what `build` makes, which is the same for all towers: towers that share cores share it.

    Args:
      key: tells it from all else that a tower builds so.
      build: takes nothing of the tower, only variables and constants.
    """
    common, key = current().common, (tf.compat.v1.get_default_graph(), key)  # a branch or a loop is a graph of its own
    if common is None:
        return build()
    if key not in common:
        common[key] = build()
    return common[key]


@contextlib.contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Makes this the current context within the block."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
