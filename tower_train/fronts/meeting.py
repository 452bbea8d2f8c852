"""Towers that meet: a program that knows nothing of towers runs once, in the first of them, and stops where something
concerns all.

There the operations that it has made until then are copied for the other towers, and the meeting gets the values of
all. What a meeting makes is made once, in the program's place: its names, control dependencies and variables are the
program's. So variables are created, Python runs, and a model is traced as on one device.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, copies, placement
from tower_train.fronts.draws import Drawn
from tower_train.graph import xla
from tower_train.graph.devices import HOST

v1 = tf.compat.v1
_current: contextvars.ContextVar["Towers | None"] = contextvars.ContextVar("towers", default=None)


def current() -> "Towers | None":
    """Returns the towers of which this thread runs the first one's program; None elsewhere, and within a meeting."""
    return _current.get()


def owner(of: type) -> Any:
    """Returns the owner of the towers whose program this thread runs, if it is of this class; None elsewhere."""
    towers = current()
    return towers.owner if towers and isinstance(towers.owner, of) else None


class Towers:
    """The towers of this process, for one program.

    Args:
      devices: over towers, a device string.
      first, count: the first one's index among the towers of all workers, and their number.
      scope: in which the program's names are; those of copies are in "tower_1/" and so on.
      owner: of the program's step, for those who know what that is.
    """

    def __init__(
        self, devices: Sequence[str], first: int = 0, count: int | None = None, scope: str = "", owner: Any = None
    ):
        self.index, self.count, self.owner = first, count or len(devices), owner
        self.batch: frozenset[tf.Operation] = frozenset()  # operations whose outputs are the program's part of it
        self.draws: Sequence[Drawn] = ()  # those cut by example so far
        # Variables that Keras layers and metrics assign to, each with its value, where a graph does not do so itself.
        self.assigned: list[tuple[tf.Variable, tf.Tensor]] = []
        # Operations whose outputs are the same in all towers, such as joined rows.
        self.same: set[tf.Operation] = set()
        self.scope, self.device = scope, devices[0]
        self._copies = [
            copies.Copy(i, f"tower_{first + i}/", devices[i], scope, devices[0]) for i in range(1, len(devices))
        ]
        self._made_for_all: set[str] = set()  # names of operations that no tower has for itself

    def run(self, program: Callable[[], Any]) -> Any:
        """Runs a program in the first tower; returns what it returns there."""
        self._graph, self._flow = v1.get_default_graph(), compat.control_flow()
        self._num_copied = len(self._graph.get_operations())
        with compat.holding(_current, self), tf.device(self.device):
            result = program()
        self._copy()
        return result

    def meet(self, mine: Any, merge: Callable[[list], Any], what: str):
        """As the function `meet`, in the program of these towers."""
        if self.count > 1 and not self.is_here():
            raise errors.GraphError(
                f"{what} is inside of a branch, a loop or a tf.function, where towers cannot meet to average it. Put "
                "it outside: compute in the branch what is to be applied. Or train in one tower."
            )
        self._copy()
        with self._apart(), _merging():
            return merge(self.over_towers(mine))

    def is_here(self) -> bool:
        """As `can_meet`."""
        return v1.get_default_graph() is self._graph and compat.control_flow() is self._flow

    def over_towers(self, value: Any) -> list:
        """Returns over towers a structure of tensors that the program has computed."""
        return [value, *(each.of(value) for each in self._copies)]

    def mine(self, per_tower: Sequence) -> Any:
        """Returns a value for the program, of which copies take the values of their towers.

        per_tower: tensors, numbers or structures of them; numbers that are the same in all towers stay numbers.
        """
        if not self._copies:
            return per_tower[0]
        return tf.nest.map_structure(self._mine, *per_tower, expand_composites=True)

    def _mine(self, *values):
        if not any(map(tf.is_tensor, values)) and all(value == values[0] for value in values):
            return values[0]
        with self._apart(), xla.not_compiled():
            first, *others = map(tf.convert_to_tensor, values)
            shape = functools.reduce(
                tf.TensorShape.most_specific_compatible_shape, (v.shape for v in others), first.shape
            )
            with tf.device(first.device or HOST):
                # of which no size is known, so that none is written into the graph that only this tower's batch has
                seen = v1.placeholder_with_default(first, shape)
        for each, value in zip(self._copies, others, strict=True):
            each.given[seen.name] = value
        return seen

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Copies no operation of this block."""
        before = len(self._graph.get_operations())
        yield
        self._made_for_all.update(op.name for op in self._graph.get_operations()[before:])

    def _copy(self) -> None:
        """Copies for the other towers what the program has made since the last time."""
        if self._copies:
            made = self._graph.get_operations()[self._num_copied :]
            copies.copy([op for op in made if op.name not in self._made_for_all], self._copies)
            self._num_copied = len(self._graph.get_operations())


@contextlib.contextmanager
def _merging():
    """Makes what concerns all towers within this block, as outside of any."""
    with (
        compat.holding(_current, None),
        compat.op_attributes({}),
        compat.outside_of_stateless_scope(),
        compat.without_all_reduce(),
        compat.without_tapes(),  # the program's, which would go back through one tower
        placement.beside_inputs(),
    ):
        yield


def meet(mine: Any, merge: Callable[[list], Any], what: str) -> Any:
    """Returns merge(over towers, their `mine`), outside of any tower. Where no towers run, merge([mine]).

    what: for messages. Raises GraphError inside of a branch of a graph.
    """
    towers = current()
    return merge([mine]) if towers is None else towers.meet(mine, merge, what)


def can_meet() -> bool:
    """Returns whether this place of the program is in the graph of the towers, not in a branch, loop or function."""
    return current().is_here()
