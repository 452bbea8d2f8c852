"""A step of a Keras model in towers: its program runs once in each, and they meet where it concerns all.

The program of a step is written for one device: Keras' own, or a `train_step` of the model's. `calls` has what it calls
where towers meet.
"""

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import console, errors, normalization
from tower_train.fronts import compat, meeting, placement
from tower_train.fronts.draws import drawn_for_more
from tower_train.fronts.keras_building import TowerScope
from tower_train.fronts.keras_towers.exchange import Exchange
from tower_train.fronts.keras_towers.whole import Whole
from tower_train.fronts.meeting import Tower
from tower_train.graph import xla
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables, variable_name

Program = Callable[[keras.Model, Any], Any]  # (model, batch) -> what the step returns
Update = tuple[keras.optimizers.Optimizer, GradientsAndVariables]

# The updates within a block of `updates_noted`.
NOTED: contextvars.ContextVar[list[Update] | None] = contextvars.ContextVar("updates", default=None)
_LONG_SECS = 10  # of silence before the first step


class Step(meeting.Towers):
    """A step of a TowerModel's template, which has all its variables, on consecutive parts of a batch, of which the
    towers of this process compute theirs."""

    def __init__(self, parallel, data, exchange: Exchange):
        devices, self.model, self._parallel, self._exchange = parallel.towers, parallel.template, parallel, exchange
        self.whole = Whole(data, len(devices), exchange, parallel.merge_device)
        self._parts = self.whole.parts
        self._added_losses: list[dict[int, set]] = [{} for _ in devices]
        self._scopes, self._is_first_turn = [_StepScope(self) for _ in devices], True
        # layers whose assignments do not depend on the examples, or are averages
        known = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
        normalizing = [each for each in compat.sublayers(self.model) if isinstance(each, known)]
        self.known = {id(variable) for layer in normalizing for variable in layer.variables}
        super().__init__(devices, len(devices) * exchange.rank, self.whole.count)

    def do(self, program: Program) -> list:
        """Runs a program in all towers; returns over towers what it returned."""

        def to_the_end(tower: Tower):
            result = program(self.model, self._parts[tower.place].data)
            self.meet(None, lambda _: None, "the end of the step")
            return result

        normalization.replace_functions()
        with contextlib.ExitStack() as stack:
            for layer in compat.sublayers(self.model):
                if getattr(layer, "synchronized", False):  # over all towers as others are, and by no strategy
                    stack.enter_context(compat.replaced(layer, "synchronized", False))
            returned = self.run(to_the_end)
        if self._parallel.is_compiled:
            xla.leave_out_other_devices(tf.compat.v1.get_default_graph())
        return returned

    @contextlib.contextmanager
    def inside(self, tower: Tower) -> Iterator[None]:
        part = self._parts[tower.place]
        leaves = [leaf for leaf in tf.nest.flatten(part.data, expand_composites=True) if tf.is_tensor(leaf)]
        with (
            tf.name_scope(f"tower_{tower.index}/"),
            self._scopes[tower.place],
            compat.functions_inlined(),
            compat.intercepted_by(self._assign_tensorflow),
            drawn_for_more(part.cuts, part.data, names_all=True, joins=self._parallel.has_own_step) as tower.draws,
            self.whole.inside(tower, [leaf for leaf in leaves if leaf.shape.rank], self._parallel.batch_norm_over),
            xla.compiled(self._parallel.is_compiled, tower.device, "tower"),
        ):
            yield

    @contextlib.contextmanager
    def turn(self, tower: Tower) -> Iterator[None]:
        compat.take_losses(self.model, self._added_losses[tower.place])
        begun = time.monotonic()
        yield
        if self._is_first_turn:
            self._is_first_turn, secs = False, len(self._parts) * (time.monotonic() - begun)
            if len(self._parts) > 1 and secs > _LONG_SECS:
                console.notice_once(
                    self.model,
                    f"Before the first step Keras traces the model in each of {len(self._parts)} towers, which takes "
                    f"more than {secs:.0f} s, once.",
                    kind="tracing",
                )

    def meet(self, mine: Any, merge: Callable[[list], Any], what: str):
        """As meeting.meet, once what the towers have assigned until then is done."""

        def merge_all(asked: list[tuple]):
            self._assign([assigned for assigned, _ in asked])
            return merge([each for _, each in asked])

        return meeting.meet((self._scopes[meeting.current().place].take(), mine), merge_all, what)

    @contextlib.contextmanager
    def compiled_if(self, is_possible: bool) -> Iterator[bool]:
        """Compiles an update in this block, if towers are compiled and it is possible; yields whether it does so."""
        devices = self._parallel.towers if self._parallel.is_compiled and is_possible else ()
        part = "tower" if self.whole.count == 1 else "update"  # which waits for all towers
        last = compat.assigning_last() if devices else contextlib.nullcontext()
        with xla.compiled_where_placed(devices, part), last:
            yield bool(devices)

    def _assign_tensorflow(self, assign: Callable, variable: tf.Variable, value: Callable):
        """Assigns to a variable of TensorFlow as to one of Keras, at once."""
        tower = meeting.current()
        if tower is None:  # as towers meet
            return assign()
        self._scopes[tower.place].assigned[id(variable)] = variable, tf.convert_to_tensor(value(), variable.dtype)
        self.meet(None, lambda _: None, f"an assignment to {variable_name(variable)}")
        return variable

    def _assign(self, per_tower: Sequence[dict[int, tuple[keras.Variable, tf.Tensor]]]) -> None:
        """Assigns what the towers do: the mean over examples to floating-point variables such as moving averages, the
        first tower's value to others. A line names variables that may differ from one device's, as their values depend
        on a tower's rows."""
        assigned = per_tower[0]
        for tower, others in enumerate(per_tower):
            if differing := [each for key, each in (assigned | others).items() if (key in assigned) != (key in others)]:
                names = ", ".join(variable_name(variable) for variable, _ in differing)
                raise errors.GraphError(
                    f"tower_{tower} and tower_0 do not assign the same variables: {names} in one of them only. The "
                    "program must do the same in each tower; what is to happen once belongs into steps.once(function)."
                )
        of_rows = functools.partial(self.whole.is_of_rows, self.towers[0])
        values = {key: value for key, (_, value) in assigned.items()}
        same = [key for key, value in values.items() if key in self.known and not of_rows(value)]  # moving averages
        averaged = [key for key, value in values.items() if value.dtype.is_floating and key not in same]
        others = [key for key in values if key not in (*same, *averaged)]
        means = self.whole.means([[each[key][1] for key in averaged] for each in per_tower])
        values |= zip(averaged, means, strict=True)
        values |= zip(others, self._exchange.first([values[key] for key in others]), strict=True)
        for key, (variable, of_first) in assigned.items():
            variable.assign(values[key])
            if self.whole.count > 1 and key not in self.known and of_rows(of_first):
                what = "the mean of what the towers assign" if key in averaged else "what the first tower assigns"
                console.notice_once(
                    variable,
                    f"{variable_name(variable)} gets {what}, each for its part of the batch: one device may differ. "
                    "In a train_step call steps.once(function) with a function that assigns.",
                )

    def once(self, function: Callable[[], Any]):
        """Calls the function; what it assigns and returns is what it assigns and returns in the first of all towers."""
        if self._exchange.size == 1:
            return function()
        with TowerScope([]) as scope:
            returned = function()
        values = [*(value for _, value in scope.assigned.values()), *keras.tree.flatten(returned)]
        from_first = iter(self._exchange.first([value for value in values if tf.is_tensor(value)]))
        values = [next(from_first) if tf.is_tensor(value) else value for value in values]
        for (variable, _), value in zip(scope.assigned.values(), values, strict=False):
            variable.assign(value)
        return keras.tree.pack_sequence_as(returned, values[len(scope.assigned) :])

    def logs(self, returned: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Merges what the towers' own steps returned: the means over this batch's examples, which of a metric's result
        is the result; ConfigError if they returned something else than a dict of scalars."""
        logs = returned[0]
        if not isinstance(logs, dict) or not logs or any(keras.ops.ndim(each) for each in keras.tree.flatten(logs)):
            raise errors.ConfigError(
                f"{type(self.model).__name__}.train_step returns {logs}; give a dict of scalars to report, such as "
                '{"loss": loss}: means over the examples.'
            )
        as_floats = [
            [tf.cast(each, keras.config.floatx()) for each in keras.tree.flatten(values)] for values in returned
        ]
        return keras.tree.pack_sequence_as(logs, self.whole.means(as_floats))


class _StepScope(TowerScope):
    """The scope of a tower's program between two meetings."""

    def __init__(self, step: Step):
        super().__init__([])
        self._step = step

    def get_current_value(self, variable):
        is_mean = tf.as_dtype(variable.dtype).is_floating and (
            variable.trainable or id(variable) not in self._step.known
        )
        if id(variable) in self.assigned and is_mean and self._step.are_here:  # one device reads that of all towers
            self._step.meet(None, lambda _: None, f"a value assigned to {variable.path}")
        value = super().get_current_value(variable)
        return compat.storage(variable) if value is None else value

    def add_update(self, update):
        if meeting.current().towers.are_here:
            super().add_update(update)
        elif meeting.current().place == 0:  # in a loop or a branch, such as the state of a layer that draws there
            compat.assign_here(*update)

    def take(self) -> dict[int, tuple[keras.Variable, tf.Tensor]]:
        """Returns what was assigned; from then on variables have their own values."""
        assigned, self.assigned = self.assigned, {}
        self.state_mapping.clear()
        return assigned


@contextlib.contextmanager
def updates_noted() -> Iterator[list[Update]]:
    """Notes the updates of optimizers within this block, in no tower: (optimizer, its gradients and variables)."""
    with compat.holding(NOTED, updates := []):
        yield updates


def rehearse(
    model: keras.Model, program: Program, data, towers: Sequence[str]
) -> tuple[list[keras.optimizers.Optimizer], list[keras.Variable | tf.Variable]]:
    """Runs a program on a whole batch, in no tower, in a graph that nobody runs: it creates the variables of layers,
    metrics and optimizers, and spreads the weights over the towers' devices. Returns the optimizers that update, and
    the variables that the program assigns, such as the state of draws that belong to no layer."""
    built, begun, assigned = set(map(id, model.weights)), [], []

    def noting(assign, variable, value):
        assigned.append(variable)
        return assign(variable, value)

    def noting_tensorflow(assign, variable, value):
        assigned.append(variable)
        return assign()

    specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data)

    def run(batch):  # TensorFlow calls this once more if it has created variables: it takes as long, for nothing
        if not begun:
            begun.append(True)
            with (
                tf.device(HOST),
                compat.intercepted_assignments(noting),
                compat.intercepted_by(noting_tensorflow),
                compat.functions_inlined(),
            ):
                program(model, batch)

    with updates_noted() as updates, compat.eager_mode(), tf.device(HOST):
        tf.function(run, autograph=False).get_concrete_function(specs)
        optimizers = list({id(optimizer): optimizer for optimizer, _ in updates}.values())
        known = [
            *model.variables,
            *model.metrics_variables,
            *(v for each in optimizers for v in each.variables),
            *assigned,
        ]
        storages = {id(compat.storage(each)) for each in known if isinstance(each, keras.Variable)}
        placement.spread(model, optimizers, towers, built)
    return optimizers, [each for each in assigned if id(each) not in storages]
