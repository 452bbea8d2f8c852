"""A model_fn called once a tower: the same variables in all, and one update for all."""

import contextlib
import inspect
import itertools
import random
from collections.abc import Callable
from unittest import mock

import tensorflow as tf
from keras.src.backend.common import (
    global_state,
)  # Keras has no public way to number its layers' names afresh for a while

from tower_train import errors
from tower_train.fronts.estimator.captured import Captured, capturing
from tower_train.fronts.estimator.spec import EstimatorSpec
from tower_train.graph import context, gradients
from tower_train.graph.devices import HOST
from tower_train.graph.record import StepReport

v1 = tf.compat.v1

# What a tower adds to these is its own affair: its total loss must not contain another tower's losses.
_OF_ONE_TOWER = (v1.GraphKeys.LOSSES, v1.GraphKeys.UPDATE_OPS, v1.GraphKeys.SUMMARIES)
_KERAS_NAMES = "object_name_uids"


def call_model_fn(model_fn: Callable, features, labels, mode: str, params: dict, config) -> EstimatorSpec:
    """Calls a model_fn with those of the arguments that it takes.

    Raises:
      GraphError: it cannot take the labels, or returns something else than an EstimatorSpec for this mode.
    """
    takes = inspect.signature(model_fn).parameters
    arguments = {"mode": mode, "params": params, "config": config}
    arguments = {name: value for name, value in arguments.items() if name in takes}
    if "labels" in takes:
        arguments["labels"] = labels
    elif labels is not None:
        raise errors.GraphError(
            "model_fn takes no labels, but input_fn gives some. Add an argument `labels` to model_fn."
        )
    spec = model_fn(features, **arguments)
    if not isinstance(spec, EstimatorSpec):
        raise errors.GraphError(
            f"model_fn returned a {type(spec).__name__}; it must return a tower_train.estimator.EstimatorSpec."
        )
    if spec.mode != mode:
        raise errors.GraphError(f"model_fn was called for mode {mode!r} and returned a spec for mode {spec.mode!r}.")
    return spec


def build_towers(
    call: Callable, next_batch: Callable, devices: tuple[str, ...], seed: int | None
) -> tuple[list[EstimatorSpec], list[Captured]]:
    """One tower a device: the first creates the variables, on the CPU, later ones get the same.

    The first tower has no name scope, so that its ops have the names that hooks know them by.

    Args:
      call: (features, labels) -> EstimatorSpec.
      next_batch: () -> (features, labels), those of the next tower.
      devices: over towers, a device string.
      seed: of the initial values that Keras layers draw; None for another one each time.

    Returns:
      Over towers, the EstimatorSpec and what the call did to variables.

    Raises:
      GraphError: a later tower would create another variable; the message names it.
    """
    graph, shared = v1.get_default_graph(), _SharedVariables()
    specs, captures, of_first = [], [], {}
    for i, device in enumerate(devices):
        features, labels = next_batch()
        with (
            tf.device(device),
            v1.name_scope(f"tower_{i}/") if i else contextlib.nullcontext(),
            tf.variable_creator_scope(shared.recalling(f"tower_{i}") if i else shared.create),
            shared.variable_scope(is_first=not i),
            shared.unassigned() if i else contextlib.nullcontext(),
            _fresh_keras_names(seed),
            capturing(i) as captured,
            context.entered(context.Context()) as tower,
        ):
            specs.append(call(features, labels))
            captures.append(captured)
        for name in tower.learning:
            raise errors.GraphError(
                f"{name} is created in a block of layers.learning, which is for workloads. Give it an optimizer of its "
                "own in model_fn."
            )
        of_first = of_first or {key: graph.get_collection(key) for key in _OF_ONE_TOWER}
        for key in _OF_ONE_TOWER:
            graph.clear_collection(key)
    for key, values in of_first.items():
        graph.get_collection_ref(key).extend(values)
    return specs, captures


def train_op(specs: list[EstimatorSpec], captures: list[Captured], global_step: tf.Variable):
    """One update for all towers.

    Args:
      specs, captures: from build_towers in mode TRAIN.
      global_step: steps done.

    Returns:
      The op that does a step; the mean of the towers' losses; the StepReport and the names of its checks, or None for
      both where a single tower updates its variables without an optimizer of TensorFlow's.

    Raises:
      GraphError: towers that cannot be averaged.
    """
    loss = tf.add_n([spec.loss for spec in specs]) / len(specs)
    counts = {len(captured.updates) for captured in captures}
    if counts == {0} and len(specs) == 1:
        return tf.group(specs[0].train_op, captures[0].assigned), loss, None, None
    if len(counts) > 1 or counts == {0}:
        raise errors.GraphError(
            f"model_fn called apply_gradients of a tf.compat.v1.train optimizer {sorted(counts)} times in its towers. "
            "Each tower must do so equally often, at least once: that is where gradients are averaged."
        )
    calls = list(zip(*[captured.updates for captured in captures], strict=True))
    averaged = [gradients.average_gradients([update.grads_and_vars for update in call]) for call in calls]
    tower_grads = [[pair for update in c.updates for pair in update.grads_and_vars] for c in captures]

    def apply():
        return tf.group([call[0].apply(mean) for call, mean in zip(calls, averaged, strict=True)])

    # What the first tower's updates were told to wait for, such as its UPDATE_OPS.
    before = [op for call in calls for op in call[0].placeholder.control_inputs]
    with tf.control_dependencies(before):
        applied = [pair for mean in averaged for pair in mean]
        finite = gradients.update_if_finite(tower_grads, tf.stack([s.loss for s in specs]), applied, loss, apply)
    for captured in captures:
        for update in captured.updates:
            update.placeholder._add_control_input(finite.op)  # what waits for it, waits for the update
    with tf.control_dependencies([finite]):
        step = global_step.read_value()
    report = StepReport(step, step, loss, tf.zeros([]), tf.zeros([]), finite)
    checked = ("the loss", *(f"the gradient of {variable.op.name}" for _, variable in applied))
    return tf.group(specs[0].train_op, finite, captures[0].assigned), loss, report, checked


class _SharedVariables:
    """Creators of variables. Those of get_variable are found again by their names; those of tf.Variable and of Keras
    layers, which are created anew at each call, by their names and the order in which they are created."""

    def __init__(self):
        self._created = {}

    def variable_scope(self, is_first: bool):
        """Where get_variable creates, or finds again. Names that it makes up are the same in each of these scopes."""
        if is_first:
            return v1.variable_scope(v1.get_variable_scope())
        return v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE, custom_getter=self._of_its_type)

    def _of_its_type(self, getter, name, *args, **kwargs):
        """A custom getter for variables whose type follows from an initial value, which reuse does not look at."""
        if name in self._created:
            kwargs["dtype"] = self._created[name][0].dtype.base_dtype
        return getter(name, *args, **kwargs)

    def create(self, create, **kwargs):
        """For the first tower."""
        with tf.device(HOST):
            variable = create(**kwargs)
        self._created.setdefault(kwargs.get("name"), []).append(variable)
        return variable

    @contextlib.contextmanager
    def unassigned(self):
        """Within this block assignments to the variables do nothing: moving averages, counters and what else a model_fn
        assigns to move once a step, by the first tower."""

        def read(variable):
            return lambda *args, **kwargs: tf.identity(variable)

        with contextlib.ExitStack() as stack:
            for variable in itertools.chain(*self._created.values()):
                for name in ("assign", "assign_add", "assign_sub"):
                    stack.enter_context(mock.patch.object(variable, name, read(variable)))
            yield

    def recalling(self, tower: str):
        """For another tower."""
        left = {name: list(variables) for name, variables in self._created.items()}

        def recall(create, **kwargs):
            name = kwargs.get("name")
            if not left.get(name):
                raise errors.GraphError(
                    f"{tower} would create the variable {name!r}, which the first tower did not create. model_fn must "
                    "create the same variables each time it is called."
                )
            return left[name].pop(0)

        return recall


@contextlib.contextmanager
def _fresh_keras_names(seed: int | None):
    """Within this block Keras names layers as in a new program, so that a checkpoint fits each graph of a model, and
    draws initial values from the seed; outside nothing changes."""
    names, state = global_state.get_global_attribute(_KERAS_NAMES), random.getstate()
    global_state.set_global_attribute(_KERAS_NAMES, None)
    if seed is not None:
        random.seed(seed)
    try:
        yield
    finally:
        global_state.set_global_attribute(_KERAS_NAMES, names)
        random.setstate(state)
