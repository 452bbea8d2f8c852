"""A model_fn called once per tower, with the same variables in all."""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.draws import drawn_for_more, rows_of_draw
from tower_train.fronts.tf_estimator.captured import Captured, capturing
from tower_train.fronts.tf_estimator.library import api
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import random_state
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

# Each tower has its own: its total loss must not contain another's losses.
_OF_ONE_TOWER = (v1.GraphKeys.LOSSES, v1.GraphKeys.UPDATE_OPS, v1.GraphKeys.SUMMARIES)


def build_towers(
    call: Callable, batches: Iterable[tuple], devices: Sequence[str], training: Training, seed: int | None
) -> tuple[list[api.EstimatorSpec], list[Captured]]:
    """Builds one tower per device: the first creates the variables, on the CPU, later ones get the same.

    The first tower has no name scope, so that hooks know its ops by the model's own names.

    Args:
      call: (features, labels) -> EstimatorSpec.
      batches: over towers, (features, labels).
      devices: over towers, a device string.
      training: of these towers.
      seed: of the initial values that Keras layers draw; None for another one each time.

    Raises:
      GraphError: a later tower would create another variable; the message names it.
    """
    graph, created, creating = v1.get_default_graph(), {}, []
    num_towers = len(devices) * training.all_reduce.num_workers
    specs, captures, of_first = [], [], {}
    for i, (device, (features, labels)) in enumerate(zip(devices, batches, strict=True)):
        with (
            tf.device(device),
            compat.fresh_layer_names(),  # so that a checkpoint fits each graph of a model
            _python_seed(seed),
            capturing(training.worker * len(devices) + i, num_towers) as captured,
            _drawn_by_example(features, captured, creating) as draws,
            _shared_variables(i, created, creating, draws),
        ):
            specs.append(call(features, labels))
            captures.append(captured)
        of_first = of_first or {key: graph.get_collection(key) for key in _OF_ONE_TOWER}
        for key in _OF_ONE_TOWER:
            graph.clear_collection(key)
    for key, values in of_first.items():
        graph.get_collection_ref(key).extend(values)
    return specs, captures


def _drawn_by_example(features, captured: Captured, creating: list[str]):
    """As drawn_for_more, of the rows that a tower's tensors have among those of all towers, whose batches are as large;
    of none if it is alone."""
    leaves = tf.nest.flatten(features) if captured.num_towers > 1 else []
    sizes = [parts.batch_size(leaf) for leaf in leaves if leaf is not None and leaf.shape.rank]
    cuts = [parts.Cut(size, captured.tower * size, captured.num_towers * size, size) for size in sizes]
    rows, program = functools.partial(rows_of_draw, cuts), "model_fn" if cuts else ""
    return drawn_for_more(rows, program, itertools.count(), lambda: bool(creating))


@contextlib.contextmanager
def _shared_variables(
    index: int, created: dict[str, list[tf.Variable]], creating: list[str], draws: list[tuple[tf.Tensor, Callable]]
) -> Iterator[None]:
    """Makes the first tower's block create variables on the host, and later towers' blocks get them.

    Those of get_variable are known by their names; those of tf.Variable and of Keras layers, created anew at each call,
    by their names and order.

    Args:
      index: of the tower.
      created: {name: variables} of the first tower, which fills it.
      creating: gets the name of a variable while it is created.
      draws: those cut by example so far, which initial values must not be.
    """
    left = {name: list(variables) for name, variables in created.items()}

    def create(create_variable, **kwargs):
        name = kwargs.get("name")
        if left.get(name):
            return left[name].pop(0)
        if index:
            raise errors.GraphError(
                f"tower_{index} would create the variable {name!r}, which the first tower did not create. model_fn "
                "must create the same variables each time it is called."
            )
        if tf.is_tensor(value := kwargs.get("initial_value")):
            kwargs["initial_value"] = _drawn_whole(value, draws)
        creating.append(name)
        with tf.device(HOST):
            variable = create_variable(**kwargs)
        creating.pop()
        created.setdefault(name, []).append(variable)
        return variable

    def get(getter, name, *args, **kwargs):
        if index and name in created:  # its type may follow from an initial value, which reuse ignores
            kwargs["dtype"] = created[name][0].dtype.base_dtype
        return getter(name, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        if index:
            stack.enter_context(v1.name_scope(f"tower_{index}/"))
        stack.enter_context(tf.variable_creator_scope(create))
        reuse, scope = v1.AUTO_REUSE if index else None, v1.get_variable_scope()
        stack.enter_context(v1.variable_scope(scope, reuse=reuse, custom_getter=get))
        for variable in itertools.chain(*created.values()):  # the first tower alone moves averages and counts
            for name in ("assign", "assign_add", "assign_sub"):
                stack.enter_context(compat.replaced(variable, name, functools.partial(_read, variable)))
        yield


def _drawn_whole(value: tf.Tensor, draws: list[tuple[tf.Tensor, Callable]]) -> tf.Tensor:
    """Returns an initial value, for which tf.random draws as always what was cut as if a size that the batch divides
    were examples."""
    needed = random_state.ancestors([value.op])
    for kept, draw in draws:
        if kept.op in needed:
            whole = draw()
            for consumer in kept.consumers():
                for i in [i for i, tensor in enumerate(consumer.inputs) if tensor is kept]:
                    compat.set_input(consumer, i, whole)
            value = whole if value is kept else value
    return value


def _read(variable: tf.Variable, *args, **kwargs) -> tf.Tensor:
    return tf.identity(variable)


@contextlib.contextmanager
def _python_seed(seed: int | None) -> Iterator[None]:
    """Seeds Python's random numbers, with which Keras seeds its initializers, within this block."""
    state = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
