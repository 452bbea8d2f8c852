"""A call of a Keras model in a tower: on values of its variables, which stay as they are."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts


class TowerScope(keras.StatelessScope):
    """A scope in which layers and programs compute on given values of variables, and what they assign is noted.

    Args:
      values: (variable, value), used instead of the variable's own value.
      assign: (variable, value) -> the value that the variable has from then on.

    Attributes:
      assigned: {id: (variable, value)}.
    """

    def __init__(self, values: Iterable[tuple], assign: Callable = lambda variable, value: value):
        # Variables without a value are a model's that was built for its layers only, and get none here.
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._assign = assign

    def add_update(self, update):
        variable, value = update
        self.assigned[id(variable)] = update
        super().add_update((variable, self._assign(variable, value)))


class Called(NamedTuple):
    """A model's outputs, the scalars that layers gave to add_loss, and (variable, value) of what layers assigned."""

    outputs: Any
    losses: list[tf.Tensor]
    assigned: list[tuple[keras.Variable, tf.Tensor]]


def tower_call(model: keras.Model, values: Iterable[tuple], x, training: bool) -> Called:
    """Calls a model on values of its variables.

    Args:
      model: with all its variables.
      values: (variable, tensor), used instead of the variable's own value.
      x: its input, a structure of tensors [batch, ...].
      training: as for the model's call.
    """
    # Not model.stateless_call: it skips __call__, with its casts, and mixes added losses with weights' regularizers.
    with TowerScope(values) as scope:
        outputs = model(x, training=training)
    return Called(outputs, [tf.reduce_sum(loss) for loss in scope.losses], list(scope.assigned.values()))


@contextlib.contextmanager
def drawn_by_example(
    cuts: Sequence[parts.Cut], program: str, op_seeds: Iterator[int], is_off: Callable[[], bool] = lambda: False
) -> Iterator[list[tuple[tf.Tensor, Callable]]]:
    """Makes keras.random and tf.random draw for the whole batch within this block, of which the tower takes the rows of
    its examples.

    Args:
      cuts: of the tower's tensors; none if it has the whole batch.
      program: the name, for messages, of what draws.
      op_seeds: of the draws of tf.random without a seed, the same ones for each tower.
      is_off: tells whether draws are as always just now, as of initial values.

    Yields:
      The cut draws, as compat.tensorflow_draws_for_more does.
    """

    def refuse(name):
        raise errors.ConfigError(
            f"{program} calls keras.random.{name}, which towers cannot draw as one device does. Draw with "
            "keras.random.normal, uniform, truncated_normal, randint or dropout, make the numbers a part of the data, "
            "or train on one device: gpus=1, of an Estimator RunConfig(num_gpus=1)."
        )

    def rows(size):
        return None if is_off() else parts.cut_of_draw(cuts, size)

    of_tensorflow = compat.tensorflow_draws_for_more(rows, op_seeds, is_off)
    with compat.keras_draws_for_more(rows, refuse if cuts else None), of_tensorflow as draws:
        yield draws
