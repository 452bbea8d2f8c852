"""A call of a Keras model in a tower: on values of its variables, which stay as they are."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.parts import Part


class TowerScope(keras.StatelessScope):
    """A scope in which layers and programs compute on given values of variables, and what they assign is noted.

    Attributes:
      assigned: {id: (variable, value)}.
    """

    def __init__(self, values: Iterable[tuple], assign: Callable | None = None, initialize_variables: bool = True):
        """Creates the scope; it begins when it is entered.

        Args:
          values: (variable, value), used instead of the variable's own value.
          assign: (variable, value) -> the value that the variable has from then on.
          initialize_variables: as for keras.StatelessScope.
        """
        super().__init__(values, collect_losses=True, initialize_variables=initialize_variables)
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._assign = assign or (lambda variable, value: value)

    def add_update(self, update):
        variable, value = update
        self.assigned[id(variable)] = update
        super().add_update((variable, self._assign(variable, value)))


class Called(NamedTuple):
    """The results of a model's call.

    Attributes:
      outputs: structured as the model's.
      losses: scalars that layers gave to add_loss.
      assigned: (variable, value) of what layers assigned.
    """

    outputs: Any
    losses: list[tf.Tensor]
    assigned: list[tuple[keras.Variable, tf.Tensor]]


def tower_call(model: keras.Model, values: Iterable[tuple], x, training: bool, **scope_args) -> Called:
    """Calls a model on values of its variables.

    Args:
      model: with all its variables.
      values: (variable, tensor), used instead of the variable's own value.
      x: its input.
      training: as for the model's call.
      scope_args: further arguments of TowerScope.
    """
    with TowerScope(values, **scope_args) as scope:
        outputs = model(x, training=training)
    return Called(outputs, [tf.reduce_sum(loss) for loss in scope.losses], list(scope.assigned.values()))


@contextlib.contextmanager
def drawn_by_example(part: Part, program: str) -> Iterator[None]:
    """Makes keras.random draw for the whole batch within this block, of which the tower takes the rows of its examples.

    Args:
      part: the tower's.
      program: the name, for messages, of what draws.
    """

    def refuse(name):
        raise errors.ConfigError(
            f"{program} calls keras.random.{name}, which towers cannot draw as one device does. Draw with "
            "keras.random.normal, uniform, truncated_normal, randint or dropout, make the numbers a part of the data, "
            "or use gpus=1."
        )

    if part.count == 1:
        yield
        return
    with compat.drawn_for_more(part.rows_of_draw, refuse):
        yield
