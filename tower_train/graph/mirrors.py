"""Where the variables live: one copy on the host for all towers, or one on each tower's device."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import HOST

v1 = tf.compat.v1


class Copies:
    """The copies of all variables.

    Copy 0 holds the originals: they have the variables' own names and are what a checkpoint holds. The other copies are
    local variables whose initializers read the originals, and so they are initialised once those have their values.

    Attributes:
      devices: over copies, where it lives.
    """

    def __init__(self, devices: tuple[str, ...] = (HOST,), towers_each: int | None = None):
        """Args: where the copies live; how many consecutive towers use one copy, None for all on the only one."""
        self.devices = devices
        self._towers_each = towers_each
        self._regularizers = {}  # {original's name: function}, in the order of creation
        self._copies = [{} for _ in devices]  # over copies, {original's name: (original, copy)}
        self._decays = [[] for _ in devices]  # over copies, the values of the regularizers
        self._states = [[] for _ in devices]  # over copies, what its optimizer and its moving averages created
        self._updated = 0  # the copy whose update is being built

    def __len__(self) -> int:
        return len(self.devices)

    def index(self, tower: int) -> int:
        """The copy that a tower uses."""
        return tower // self._towers_each if self._towers_each else 0

    def prepare(self, tower: int) -> None:
        """Makes the copy that a tower uses, of all variables that tower 0 asked for.

        Raises:
          GraphError: there are trained variables that it did not ask get_variable for.
        """
        index = self.index(tower)
        if not index or self._copies[index]:
            return
        for variable in v1.trainable_variables():
            if variable.op.name not in self._regularizers:
                raise errors.GraphError(
                    f"{variable.op.name} cannot be mirrored: the network did not get it from "
                    "tf.compat.v1.get_variable. Get it there, or use --variable_update=cpu."
                )
        for name, (original, regularizer) in self._regularizers.items():
            copy = self._copy(original, index)
            self._copies[index][name] = (original, copy)
            if regularizer:
                with tf.device(self.devices[index]), v1.name_scope(f"{copy.op.name}/Regularizer/"):
                    decay = regularizer(copy)
                self._decays[index] += [] if decay is None else [decay]  # None: tf.compat.v1.no_regularizer's

    def getter(self, tower: int):
        """A custom getter: a tower that asks for a variable gets its copy of it."""

        def get(getter, name, *args, regularizer=None, **kwargs):
            variable = getter(name, *args, regularizer=regularizer, **kwargs)
            if tower == 0:
                self._regularizers.setdefault(variable.op.name, (variable, regularizer))
            return self.of(self.index(tower), [variable])[0]

        return get

    def create(self, create, **kwargs) -> tf.Variable:
        """A variable creator for tower 0: the originals live where copy 0 does."""
        with tf.device(self.devices[0]):
            return create(**kwargs)

    def of(self, index: int, originals: Sequence[tf.Variable]) -> list[tf.Variable]:
        """One copy of some variables; the originals themselves where it has none."""
        return [self._copies[index].get(variable.op.name, (None, variable))[1] for variable in originals]

    def original(self, variable: tf.Variable) -> tf.Variable:
        """The original of any copy of a variable."""
        return next(
            (original for copies in self._copies for original, copy in copies.values() if copy is variable), variable
        )

    def decays(self, index: int) -> list[tf.Tensor]:
        """The values of the variables' regularizers, scalars, computed from one copy.

        Raises:
          GraphError: there are regularization losses that are not a variable's, which cannot be computed from a copy.
        """
        losses = v1.losses.get_regularization_losses()
        if index == 0:
            return losses
        if len(losses) != len(self._decays[index]):
            raise errors.GraphError(
                f"There are {len(losses)} regularization losses, but {len(self._decays[index])} variables with a "
                "regularizer=. Declare them all so, or use --variable_update=cpu."
            )
        return self._decays[index]

    @contextlib.contextmanager
    def updated(self) -> Iterator[None]:
        """Within this block the updates of all copies are built, one after the other, each after a call of `update`."""
        with tf.variable_creator_scope(self._create_state):
            yield

    def update(self, index: int) -> None:
        """From here on, what an optimizer or a moving average creates belongs to this copy."""
        self._updated = index

    def pairs(self) -> list[tuple[tf.Variable, list[tf.Variable]]]:
        """(original, its other copies) of everything that is copied; call it when all updates are built."""
        trained = [(original, [copies[name][1] for copies in self._copies[1:]])
                   for name, (original, _) in self._regularizers.items()]  # fmt: skip
        return trained + [(states[0], list(states[1:])) for states in zip(*self._states, strict=True)]

    def _create_state(self, create, **kwargs):
        index = self._updated
        if index:
            original = self._states[0][len(self._states[index])]
            kwargs |= _as_copy(original)
        variable = create(**kwargs)
        self._states[index].append(variable)
        return variable

    def _copy(self, original: tf.Variable, index: int) -> tf.Variable:
        with tf.device(self.devices[index]):
            name = f"copy_{index}/{original.op.name}"
            return v1.Variable(name=name, dtype=original.dtype.base_dtype, use_resource=True, **_as_copy(original))


def _as_copy(original: tf.Variable) -> dict:
    """The arguments that make a variable a copy."""
    return {
        "initial_value": original.read_value,
        "trainable": False,
        "constraint": original.constraint,
        "collections": [v1.GraphKeys.LOCAL_VARIABLES],
    }


def fingerprints(pairs: Sequence[tuple[tf.Variable, list[tf.Variable]]]) -> tf.Tensor:
    """What tells copies apart: a 64-bit fingerprint (FarmHash) of the bytes of each variable.

    Returns:
      int64 [copies, variables].
    """

    def fingerprint(variable):
        values = tf.reshape(variable.read_value(), [1, -1])
        return tf.bitcast(tf.raw_ops.Fingerprint(data=tf.bitcast(values, tf.uint8), method="farmhash64"), tf.int64)[0]

    with v1.name_scope("mirrors"):
        rows = [[original, *copies] for original, copies in pairs]
        return tf.stack([tf.stack([fingerprint(variable) for variable in copy]) for copy in zip(*rows, strict=True)])
