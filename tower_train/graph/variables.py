"""The variables: one copy on the host for all towers, or one on each tower's device.

Builders of a step need not know which: a value of each copy is an element of a list over copies, made by `each` or
`average` and passed on to the next of them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables, with_gradients

v1 = tf.compat.v1


class Variables:
    """All copies of the variables.

    Copy 0 holds the originals, under the variables' own names, for checkpoints. The other copies are local variables
    initialised from the originals, after those have their values.

    Attributes:
      devices: over copies, the device of each.
    """

    def __init__(
        self, devices: tuple[str, ...] = (HOST,), towers_each: int | None = None, all_reduce: AllReduce | None = None
    ):
        """Creates none yet.

        Args:
          devices: of the copies.
          towers_each: number of consecutive towers that use one copy; None for all on the only one.
          all_reduce: averages between the copies of all workers; None for one copy of one worker.
        """
        self.devices = devices
        self._towers_each = towers_each
        self._all_reduce = all_reduce or AllReduce(devices, "add_n")
        self._regularizers = {}  # {original's name: (original, function or None)}, in the order of creation
        self._copies = [{} for _ in devices]  # over copies, {original's name: copy}
        self._decays = [[] for _ in devices]  # over copies, the values of the regularizers
        self._states = [[] for _ in devices]  # over copies, variables of its optimizer and its moving averages
        self._current = None  # the current copy of `each`

    # Towers.

    @contextlib.contextmanager
    def of_tower(self, tower: int) -> Iterator[None]:
        """Lets tower 0 create variables within this block, and later towers find them or their copies of them. Raises
        GraphError if a later tower would create a variable, or some cannot be copied."""
        copy = self._copy_of(tower)
        if copy and not self._copies[copy]:
            self._make_copy(copy)

        def create(create, **kwargs):
            if tower:
                which = f"the variable {kwargs['name']!r}" if kwargs.get("name") else "a variable without a name"
                raise errors.GraphError(
                    f"tower_{tower} would create {which}, which tower_0 did not create. "
                    "Create variables with tf.compat.v1.get_variable under names that are the same in every call of "
                    "inference and loss."
                )
            with tf.device(self.devices[0]):
                return create(**(kwargs if self.devices[0] == HOST else _begun_on_host(kwargs)))

        def get(getter, name, *args, regularizer=None, **kwargs):
            variable = getter(name, *args, regularizer=regularizer, **kwargs)
            if tower == 0:
                self._regularizers.setdefault(variable.op.name, (variable, regularizer))
            return self._copies[copy].get(variable.op.name, variable)

        with (
            tf.variable_creator_scope(create),
            v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE, custom_getter=get),
        ):
            yield

    def gradients(self, tower: int, loss: tf.Tensor) -> GradientsAndVariables:
        """Returns the gradients of a tower's loss for its copy of the trained variables, each with the original."""
        originals = v1.trainable_variables()
        return list(zip(v1.gradients(loss, self._of(self._copy_of(tower), originals)), originals, strict=True))

    def original(self, variable: tf.Variable) -> tf.Variable:
        for copies in self._copies:
            for name, copy in copies.items():
                if copy is variable:
                    return self._regularizers[name][0]
        return variable

    # Values of each copy.

    def each(self, function: Callable, *values: Sequence) -> list:
        """Calls function for each copy of the variables, on its device.

        Args:
          function: gets the copy's element of each of `values`.
          values: over copies.

        Returns:
          The results, over copies.
        """
        results = []
        for i, (device, *own) in enumerate(zip(self.devices, *values, strict=True)):
            self._current = i
            with tf.device(device):
                results.append(function(*own))
        self._current = None
        return results

    def by_copy(self, by_tower: Sequence) -> list[list]:
        """Splits a list over towers into a list over copies of lists over the copy's towers."""
        towers = [[] for _ in self.devices]
        for tower, value in enumerate(by_tower):
            towers[self._copy_of(tower)].append(value)
        return towers

    def average(
        self, mean: Callable[[list[GradientsAndVariables]], GradientsAndVariables],
        tower_grads: list[GradientsAndVariables],
    ) -> list[GradientsAndVariables]:  # fmt: skip
        """Averages gradients over all towers of all workers: over the towers of each copy, then between the copies.

        Args:
          mean: average_gradients.
          tower_grads: over towers, from `gradients`.

        Returns:
          Over copies, (mean gradient, the copy's variable).
        """
        own_means = self.each(mean, self.by_copy(with_gradients(tower_grads)))
        means = self._all_reduce.mean([[grad for grad, _ in own] for own in own_means])
        originals = [variable for _, variable in own_means[0]]
        return [list(zip(grads, self._of(i, originals), strict=True)) for i, grads in enumerate(means)]

    def average_values(self, tower_values: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Averages as `average`, but tensors, equally many of each tower, sent in their own dtype; returns the means,
        over copies."""

        def mean(towers):
            with v1.name_scope("average_values"):
                return [tf.add_n(values) / len(values) for values in zip(*towers, strict=True)]

        return self._all_reduce.mean(self.each(mean, self.by_copy(tower_values)), exactly=True)

    def weight_decays(self) -> list[list[tf.Tensor]]:
        """Returns the values of the variables' regularizers, scalars, over copies. Raises GraphError for regularization
        losses without a variable, which cannot be computed from a copy."""
        losses = v1.losses.get_regularization_losses()
        for decays in self._decays[1:]:
            if len(decays) != len(losses):
                raise errors.GraphError(
                    f"There are {len(losses)} regularization losses, but {len(decays)} variables with a regularizer=. "
                    "Declare them all so, or use --variable_update=cpu."
                )
        return [losses, *self._decays[1:]]

    def trained(self) -> list[list[tf.Variable]]:
        """Returns the trained variables, over copies."""
        return [self._of(i, v1.trainable_variables()) for i in range(len(self.devices))]

    # The update.

    @contextlib.contextmanager
    def updated(self) -> Iterator[None]:
        """Builds the update of all copies within this block: it waits for the means between devices, which all must
        compute. Variables that `each` creates in it, such as the optimizer's slots, belong to the copy."""
        with tf.variable_creator_scope(self._create_state), tf.control_dependencies(self._all_reduce.operations):
            yield

    def _create_state(self, create, **kwargs):
        if self._current is None:
            return create(**kwargs)
        states = self._states[self._current]
        if self._current:
            kwargs |= _as_copy(self._states[0][len(states)])
        states.append(create(**kwargs))
        return states[-1]

    # Copies that must stay the same, and workers that must begin the same.

    def copied(self) -> list[list[tf.Variable]]:
        """Returns all that was copied so far: over variables, the original and its copies."""
        trained = [[original, *(copies[name] for copies in self._copies[1:])]
                   for name, (original, _) in self._regularizers.items()]  # fmt: skip
        return trained + [list(states) for states in zip(*self._states, strict=True)]

    def fingerprints(self) -> tf.Tensor:
        """Returns int64 [copies of all workers, variables], fingerprints (FarmHash) of the bytes of `copied`, to
        compare copies."""

        with v1.name_scope("mirrors"):
            method, as_row = tf.constant("farmhash64"), tf.constant([1, -1])

            def fingerprint(variable):
                values = tf.bitcast(tf.reshape(variable.read_value(), as_row), tf.uint8)
                return tf.raw_ops.Fingerprint(data=values, method=method)

            rows = [tf.concat([fingerprint(v) for v in copy], axis=0) for copy in zip(*self.copied(), strict=True)]
            return self._all_reduce.gather(tf.bitcast(tf.stack(rows), tf.int64))

    def broadcast(self, variables: Sequence[tf.Variable], worker: int) -> tf.Operation:
        """Copies worker 0's values of variables to all workers, all of which must run it."""
        return self._all_reduce.broadcast(variables, worker)

    def _copy_of(self, tower: int) -> int:
        return tower // self._towers_each if self._towers_each else 0

    def _of(self, copy: int, originals: Sequence[tf.Variable]) -> list[tf.Variable]:
        return [self._copies[copy].get(variable.op.name, variable) for variable in originals]

    def _make_copy(self, index: int) -> None:
        """Copies all variables that tower 0 asked for."""
        for variable in v1.trainable_variables():
            if variable.op.name not in self._regularizers:
                raise errors.GraphError(
                    f"{variable.op.name} cannot be mirrored: the network did not get it from "
                    "tf.compat.v1.get_variable. Get it there, or use --variable_update=cpu."
                )
        for name, (original, regularizer) in self._regularizers.items():
            with tf.device(self.devices[index]):
                copy = v1.Variable(
                    name=f"copy_{index}/{name}", dtype=original.dtype.base_dtype, use_resource=True,
                    **_as_copy(original),
                )  # fmt: skip
                self._copies[index][name] = copy
                if regularizer:
                    with v1.name_scope(f"{copy.op.name}/Regularizer/"):
                        decay = regularizer(copy)
                    self._decays[index] += [] if decay is None else [decay]  # None: tf.compat.v1.no_regularizer's


def _begun_on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a variable initialised on the host: GPUs draw other numbers from a seed and call no
    Python."""
    initial_value = kwargs.get("initial_value")
    if not callable(initial_value):
        return kwargs
    with tf.init_scope(), tf.device(HOST), v1.name_scope(f"{kwargs.get('name') or 'Variable'}/Initializer/"):
        return kwargs | {"initial_value": initial_value()}


def _as_copy(original: tf.Variable) -> dict[str, Any]:
    """Returns the arguments that make a variable a copy."""
    # Read on the original's device and given as a value: a function's result would be on the copy's.
    with tf.init_scope(), v1.get_default_graph().colocate_with(None, True), tf.device(original.device):
        value = original.read_value()
    return {
        "initial_value": value,
        "trainable": False,
        "constraint": original.constraint,
        "collections": [v1.GraphKeys.LOCAL_VARIABLES],
    }
