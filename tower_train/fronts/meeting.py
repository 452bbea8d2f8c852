"""Towers that meet: a program that knows nothing of towers runs once in each; they wait for each other where something
concerns all of them.

Each tower has a thread, and one thread runs at a time. It runs until it meets; once all towers do so, the first one
goes on with the meeting and with its program, then the others. So ops are made in the order of the program, and what a
meeting makes stands in the first tower's place: its names, control dependencies and variables are the program's.
"""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, placement

v1 = tf.compat.v1
_current: contextvars.ContextVar["Tower | None"] = contextvars.ContextVar("tower", default=None)


class _AbandonedError(BaseException):
    """Ends the thread of a tower that waits, after an error in another; programs do not catch it."""


@dataclasses.dataclass(eq=False)
class Tower:
    """A running tower."""

    towers: "Towers"  # of this process
    place: int  # its index among them
    index: int  # its index among the towers of all workers
    count: int  # number of towers over all workers
    device: str
    means: int = 0  # number of means so far
    batch: frozenset[tf.Operation] = frozenset()  # operations whose outputs are its part of the batch
    draws: Sequence[tuple[tf.Tensor, Callable]] = ()  # those cut by example so far, as draws.Drawn
    # Variables that Keras layers assign to, each with its value, where a graph does not do so itself.
    assigned: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)
    # Operations whose outputs are the same in all towers, such as joined rows.
    same: set[tf.Operation] = dataclasses.field(default_factory=set)


def current() -> Tower | None:
    """Returns the tower whose program this thread runs; None elsewhere, and within a meeting."""
    return _current.get()


def owner(of: type) -> Any:
    """Returns the owner of the towers of which this thread runs one, if it is of this class; None elsewhere."""
    tower = current()
    return tower.towers.owner if tower and isinstance(tower.towers.owner, of) else None


class Towers:
    """The towers of this process, for one program.

    Args:
      devices: over towers, a device string.
      first, count: the first one's index among the towers of all workers, and their number.
      owner: of the program's step, for those who know what that is; None for this.
    """

    def __init__(self, devices: Sequence[str], first: int = 0, count: int | None = None, owner: Any = None):
        self.towers = [Tower(self, i, first + i, count or len(devices), name) for i, name in enumerate(devices)]
        self.owner = owner or self
        self._threads: list[_Thread] = []

    def inside(self, tower: Tower) -> contextlib.AbstractContextManager:
        """Returns the block in which a tower's program runs, in its thread."""
        return contextlib.nullcontext()

    def turn(self, tower: Tower) -> contextlib.AbstractContextManager:
        """Returns the block around each of a tower's turns, for state that the process or the graph shares."""
        return contextlib.nullcontext()

    def run(self, function: Callable[[Tower], Any]) -> list:
        """Runs function(tower) in all towers; returns over towers what it returned. An error in one ends all.

        Raises GraphError if towers meet at different places, or not equally often.
        """
        self._graph, self._flow = v1.get_default_graph(), compat.control_flow()
        if len(self.towers) == 1:  # in the program's own thread
            [tower] = self.towers
            with self.turn(tower):
                return [self._program(tower, function, contextlib.nullcontext)()]
        inherit = compat.thread_state()
        self._threads = [_Thread(self._program(tower, function, inherit)) for tower in self.towers]
        try:
            while True:
                for tower, thread in zip(self.towers, self._threads, strict=True):
                    with compat.op_attributes(thread.op_attributes), self.turn(tower):
                        thread.resume()
                    if thread.error:
                        raise thread.error
                if all(thread.is_done for thread in self._threads):
                    return [thread.result for thread in self._threads]
                self._check_place()
        finally:
            for thread in self._threads:
                thread.abandon()

    def _program(self, tower: Tower, function: Callable, inherit: Callable) -> Callable[[], Any]:
        def program():
            with inherit(), compat.holding(_current, tower), tf.device(tower.device), self.inside(tower):
                return function(tower)

        return program

    def merged(self, place: int, mine: Any, merge: Callable[[list], Any], what: str) -> Any:
        """As `meet`, in the tower of this place."""
        if not self._threads:
            with _merging():
                return merge([mine])
        self._threads[place].wait_for_others(mine, what)
        if place == 0:
            with _merging():
                self._merged = merge([each.mine for each in self._threads])
        return self._merged

    @property
    def are_here(self) -> bool:
        """Returns whether this place is in the graph of the towers, not in a branch, a loop or a function."""
        return v1.get_default_graph() is self._graph and compat.control_flow() is self._flow

    def _check_place(self) -> None:
        places = ["the end of its program" if thread.is_done else thread.what for thread in self._threads]
        for tower, place in zip(self.towers, places, strict=True):
            if place != places[0]:
                raise errors.GraphError(
                    f"tower_{self.towers[0].index} is at {places[0]}, where all towers must meet, and "
                    f"tower_{tower.index} at {place}. The program must do the same in each tower."
                )


class _Thread:
    """The thread of a tower: it runs while its owner waits in `resume`, and waits in `wait_for_others`."""

    def __init__(self, program: Callable[[], Any]):
        self.result = self.error = self.mine = None
        self.what, self.is_done, self._is_abandoned = "", False, False
        self.op_attributes = compat.current_op_attributes()
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=[self._run, program], name="tower", daemon=True)

    def resume(self) -> None:
        if self.is_done:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._turn.release()
        self._pause.acquire()

    def wait_for_others(self, mine: Any, what: str) -> None:
        if self._is_abandoned:  # its program meets on its way out, as in a `finally`
            raise _AbandonedError
        self.mine, self.what = mine, what
        self._pause.release()
        self._turn.acquire()
        if self._is_abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        self._is_abandoned = True
        if self._thread.ident is not None:
            self.resume()
            self._thread.join()

    def _run(self, program: Callable[[], Any]) -> None:
        self._turn.acquire()
        try:
            self.result = program()
        except BaseException as error:  # whatever it is, the owner raises it
            self.error = error
        self.is_done = True
        self._pause.release()


@contextlib.contextmanager
def _merging():
    """Makes what concerns all towers within this block, as outside of any."""
    with (
        compat.holding(_current, None),
        compat.op_attributes({}),
        compat.outside_of_stateless_scope(),
        compat.without_all_reduce(),
        compat.without_tapes(),  # the first tower's, which would go back in another order than the others'
        placement.beside_inputs(),
    ):
        yield


def meet(mine: Any, merge: Callable[[list], Any], what: str) -> Any:
    """Waits for all towers; merge(over towers, their `mine`) is called once, in the first tower's place, outside of any
    tower. Returns its result in each. Where no towers run, merge([mine]).

    what: for messages, and the same in all towers. Raises GraphError inside of a branch of a graph.
    """
    tower = current()
    if tower is None:
        return merge([mine])
    if tower.count > 1 and not tower.towers.are_here:
        raise errors.GraphError(
            f"{what} is inside of a branch, a loop or a tf.function, where towers cannot meet to average it. Put it "
            "outside: compute in the branch what is to be applied. Or train in one tower."
        )
    return tower.towers.merged(tower.place, mine, merge, what)
