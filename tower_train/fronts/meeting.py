"""Towers that meet: a program that knows nothing of towers runs once in each; they wait for each other where something
concerns all of them.

Each tower has a thread, and one thread runs at a time. It runs until it meets; once all towers do so, the first one
goes on with the meeting and with its program, then the others. So ops are made in the order of the program, and what a
meeting makes stands in the first tower's place: its names, control dependencies and variables are the program's.

Gradients of variables, wherever a program computes them, are the means over all towers. What it does with them before
it applies them, such as clipping, is thus what one device does.
"""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, placement
from tower_train.fronts.averages import Averages
from tower_train.fronts.draws import Drawn, draw_whole
from tower_train.graph import context, gradients
from tower_train.graph.gradients import Gradient, GradientsAndVariables

v1 = tf.compat.v1
_current: contextvars.ContextVar["Tower | None"] = contextvars.ContextVar("tower", default=None)
_is_backward: contextvars.ContextVar[bool] = contextvars.ContextVar("is_backward", default=False)


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
    draws: Sequence[Drawn] = ()  # those cut by example so far


def current() -> Tower | None:
    """Returns the tower whose program this thread runs; None elsewhere, and within a meeting."""
    return _current.get()


class Towers:
    """The towers of this process, for one program.

    Args:
      devices: over towers, a device string.
      averages: over all towers; None: the plain mean of these.
      first, count: the first one's index among the towers of all workers, and their number.
      inside: tower -> context manager in which its program runs, in its thread.
      turn: tower -> context manager around each of its turns, for state that the process or the graph shares.
    """

    def __init__(
        self, devices: Sequence[str], averages: Averages | None = None, first: int = 0, count: int | None = None,
        inside: Callable[[Tower], contextlib.AbstractContextManager] = contextlib.nullcontext,
        turn: Callable[[Tower], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):  # fmt: skip
        self._towers = [Tower(self, i, first + i, count or len(devices), name) for i, name in enumerate(devices)]
        self.averages = averages or Averages([1 / len(devices)] * len(devices))
        self._inside, self._turn, self.have_averaged = inside, turn, False
        self._means: dict[Any, list[Gradient]] = {}  # {reference of a mean of gradients: over towers, the gradients}
        self._threads: list[_Thread] = []

    def run(self, function: Callable[[Tower], Any]) -> list:
        """Runs function(tower) in all towers; returns over towers what it returned. An error in one ends all.

        Raises GraphError if towers meet at different places, or not equally often.
        """
        self._graph, self._flow = v1.get_default_graph(), compat.control_flow()
        if len(self._towers) == 1:  # in the program's own thread
            [tower] = self._towers
            with self._turn(tower):
                return [self._program(tower, function, contextlib.nullcontext)()]
        inherit = compat.thread_state()
        self._threads = [_Thread(self._program(tower, function, inherit)) for tower in self._towers]
        try:
            while True:
                for tower, thread in zip(self._towers, self._threads, strict=True):
                    with compat.op_attributes(thread.op_attributes), self._turn(tower):
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
            with (
                inherit(),
                compat.holding(_current, tower),
                tf.device(tower.device),
                self._inside(tower),
                compat.gradients_by(_gradients),
            ):
                return function(tower)

        return program

    def meet(self, tower: Tower, mine: Any, merge: Callable[[list], Any], what: str):
        """As the function `meet`, in one of these towers."""
        if tower.count > 1 and not self.are_here():
            raise errors.GraphError(
                f"{what} is inside of a branch, a loop or a tf.function, where towers cannot meet to average it. Put "
                "it outside: compute in the branch what is to be applied. Or train in one tower."
            )
        if not self._threads:
            with _merging():
                return merge([mine])
        thread = self._threads[tower.place]
        thread.wait_for_others(mine, what)
        if tower.place == 0:
            with _merging():
                self._merged = merge([each.mine for each in self._threads])
        return self._merged

    def mean_gradients(self, tower: Tower, pairs: GradientsAndVariables, is_differentiable: bool) -> list[Gradient]:
        """Returns a tower's means of gradients over all towers; None for variables without a gradient in any."""
        tower.means += 1
        names = ", ".join(gradients.variable_name(variable) for _, variable in pairs[:2])
        what = f"the gradients (no. {tower.means}) of {names}{', ...' if len(pairs) > 2 else ''}"

        def merge(per_tower):
            self.have_averaged = True
            there = [i for i, grads in enumerate(zip(*per_tower, strict=True)) if any(g is not None for g, _ in grads)]
            asked = gradients.without_unused([[each[i] for i in there] for each in per_tower])
            means = [grad for grad, _ in self.averages.gradients(asked)]
            return dict(zip(there, zip(means, zip(*asked, strict=True), strict=True), strict=True))

        found = self.meet(tower, pairs, merge, what)
        means: list[Gradient] = [None] * len(pairs)
        for i, (mean, mine) in found.items():
            if is_differentiable:
                mean = _differentiable(pairs[i][0], mean, f"{what}: {i}")
            for tensor in (mean.values, mean.indices) if isinstance(mean, tf.IndexedSlices) else [mean]:
                self._means[tensor.ref()] = [grad for grad, _ in mine]
            means[i] = mean
        return means

    def updates(self, per_tower: Sequence[GradientsAndVariables]) -> GradientsAndVariables:
        """Returns the gradients to apply. Those computed from means alone, such as clipped ones, are the first tower's;
        others are averaged."""
        self.have_averaged, per_tower = True, gradients.without_unused(list(per_tower))
        if self._towers[0].count == 1:
            return per_tower[0]
        apart = [i for i, (grad, _) in enumerate(per_tower[0]) if not self._is_of_means(_tensor(grad))]
        averaged = self.averages.gradients([[pairs[i] for i in apart] for pairs in per_tower])
        means = dict(zip(apart, averaged, strict=True))
        return [means.get(i, pair) for i, pair in enumerate(per_tower[0])]

    def before_means(self, per_tower: Sequence[GradientsAndVariables]) -> list[GradientsAndVariables]:
        """Replaces means by the gradients that each tower had before they met."""
        return [
            [
                (self._means[key][i] if (key := _tensor(grad).ref()) in self._means else grad, v)
                for grad, v in pairs
                if grad is not None
            ]
            for i, pairs in enumerate(per_tower)
        ]

    def _is_of_means(self, grad: tf.Tensor) -> bool:
        """Returns whether the first tower computes a tensor from means of gradients and not from its batch; if so,
        noise in it is drawn as one device draws it."""
        tower, seen, left, is_of_means = self._towers[0], set(), [grad], False
        while left:
            tensor = left.pop()
            if tensor.ref() in self._means:
                is_of_means = True
            elif tensor.op in tower.batch:
                return False
            elif tensor.op not in seen:
                seen.add(tensor.op)
                left += tensor.op.inputs
        if is_of_means:
            draw_whole(seen, tower.draws)  # noise on gradients belongs to no example
        return is_of_means

    def are_here(self) -> bool:
        """As `can_meet`."""
        return v1.get_default_graph() is self._graph and compat.control_flow() is self._flow

    def _check_place(self) -> None:
        places = ["the end of its program" if thread.is_done else thread.what for thread in self._threads]
        for tower, place in zip(self._towers, places, strict=True):
            if place != places[0]:
                raise errors.GraphError(
                    f"tower_{self._towers[0].index} is at {places[0]}, where all towers must meet, and "
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
    return merge([mine]) if tower is None else tower.towers.meet(tower, mine, merge, what)


def can_meet() -> bool:
    """Returns whether this place of the program is in the graph of the towers, not in a branch, loop or function."""
    return current().towers.are_here()


def mean(values: Sequence[tf.Tensor], what: str = "a mean over towers") -> list[tf.Tensor]:
    """Returns the means over all towers of all workers, weighted by their examples, of tensors of equal shapes and of
    floating point: as batch normalisation over the whole batch needs. All travel together, in one exchange.

    Their gradients are exact, of any order: backwards towers meet for the mean of the gradients.
    """
    tower, values = current(), list(values)
    if tower is None or tower.count == 1:
        return values
    tower.means += 1
    what = f"{what} (no. {tower.means})"  # backwards towers must meet for the same one
    means = meet(values, tower.towers.averages.means, what)

    @tf.custom_gradient  # of the means too, or variables that they were computed from would count as the function's
    def with_gradient(*tensors):
        def gradient(*grads):
            return *gradients_of_means(grads, what), *(None for _ in grads)

        return [tf.identity(each) for each in tensors[len(values) :]], gradient

    return with_gradient(*values, *means)


def gradients_of_means(grads: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
    """Returns the gradients with respect to a tower's values, from those with respect to their means."""
    tower, what = current(), f"the gradient of {what}"
    if (share := tower.towers.averages.share_of_loss(tower.place)) is None:
        return mean(grads, what)
    shares = [tf.cast(share, grad.dtype) for grad in grads]
    means = mean(map(tf.math.divide_no_nan, grads, shares), what)
    return list(map(tf.multiply, means, shares))


def _gradients(compute: Callable[[], list[tuple]], is_recorded: bool) -> list[Gradient]:
    """Computes gradients in a tower. Those of variables are means over all towers, except in a branch, a loop or a
    tf.function, where towers cannot meet."""
    tower = current()
    if tower is None or tower.count == 1 or _is_backward.get() or not can_meet():
        return [grad for grad, _ in compute()]
    with compat.holding(_is_backward, True):  # gradients that a gradient is computed by are parts of it
        pairs = compute()
    asked = [i for i, (_, source) in enumerate(pairs) if isinstance(source, (tf.Variable, keras.Variable))]
    grads = [grad for grad, _ in pairs]
    means = tower.towers.mean_gradients(tower, [pairs[i] for i in asked], is_recorded) if asked else []
    for i, mean in zip(asked, means, strict=True):
        grads[i] = mean
    return grads


def _differentiable(mine: Gradient, mean: Gradient, what: str) -> Gradient:
    """Returns a mean of gradients, with its gradient."""
    is_sparse = isinstance(mean, tf.IndexedSlices)

    @tf.custom_gradient
    def with_gradient(_, tensor):
        def gradient(grad):
            if is_sparse:
                raise errors.GraphError(
                    f"{what}: the gradient of a gradient that is rows of a table is not averaged over towers. Compute "
                    "such a penalty without the table, or train in one tower."
                )
            return gradients_of_means([grad], what)[0], None

        return tf.identity(tensor), gradient

    with tf.device(_tensor(mean).device):  # where its variable is
        linked = with_gradient(_tensor(mine), _tensor(mean))
    return tf.IndexedSlices(linked, mean.indices, mean.dense_shape) if is_sparse else linked


def _tensor(grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def normalizing(tower: Tower, inputs: Sequence[tf.Tensor], batch_norm: str) -> contextlib.AbstractContextManager:
    """Lets what is computed from these inputs, a tower's part of the batch, be normalised over all towers, or by
    "tower". The tower notes them as its batch."""
    towers_mean = functools.partial(mean, what="batch normalisation")
    tower.batch = frozenset(each.op for each in inputs)
    entered = context.Context(towers=tower.count, by_tower=batch_norm == "tower", mean=towers_mean)
    return entered.enter_tower(inputs=inputs)
