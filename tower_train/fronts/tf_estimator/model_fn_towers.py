"""A model_fn called once per tower: the same variables in all, and one update for all."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import parts
from tower_train.fronts.lockstep.tower_call import drawn_by_example
from tower_train.fronts.tf_estimator.captured import Captured, assign_merged, capturing
from tower_train.fronts.tf_estimator.library import api
from tower_train.graph import gradients
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

# Each tower has its own: its total loss must not contain another's losses.
_OF_ONE_TOWER = (v1.GraphKeys.LOSSES, v1.GraphKeys.UPDATE_OPS, v1.GraphKeys.SUMMARIES)


def build_towers(
    call: Callable, batches: Iterable[tuple], devices: Sequence[str], num_workers: int, worker: int, seed: int | None
) -> tuple[list[api.EstimatorSpec], list[Captured]]:
    """Builds one tower per device: the first creates the variables, on the CPU, later ones get the same.

    The first tower has no name scope, so that hooks know its ops by the model's own names.

    Args:
      call: (features, labels) -> EstimatorSpec.
      batches: over towers, (features, labels).
      devices: over towers, a device string.
      num_workers: each with as many towers.
      worker: index of this one.
      seed: of the initial values that Keras layers draw; None for another one each time.

    Returns:
      Over towers, the EstimatorSpec and the captured changes of variables.

    Raises:
      GraphError: a later tower would create another variable; the message names it.
    """
    graph, shared = v1.get_default_graph(), _SharedVariables()
    specs, captures, of_first = [], [], {}
    for i, (device, (features, labels)) in enumerate(zip(devices, batches, strict=True)):
        with (
            tf.device(device),
            shared.tower(i),
            compat.fresh_layer_names(),  # so that a checkpoint fits each graph of a model
            _python_seed(seed),
            capturing(worker * len(devices) + i, len(devices) * num_workers, is_first=not i) as captured,
            drawn_by_example(_cuts(features, captured), "model_fn", itertools.count(), lambda: shared.creates),
        ):
            specs.append(call(features, labels))
            captures.append(captured)
        of_first = of_first or {key: graph.get_collection(key) for key in _OF_ONE_TOWER}
        for key in _OF_ONE_TOWER:
            graph.clear_collection(key)
    for key, values in of_first.items():
        graph.get_collection_ref(key).extend(values)
    return specs, captures


def _cuts(features, captured: Captured) -> list[parts.Cut]:
    """Returns the rows that a tower's tensors have among those of all towers, whose batches are as large; none if it is
    alone."""
    tensors = [leaf for leaf in tf.nest.flatten(features) if leaf.shape.rank] if captured.num_towers > 1 else []
    sizes = [parts.batch_size(tensor) for tensor in tensors]
    return [parts.Cut(size, captured.tower * size, captured.num_towers * size, size) for size in sizes]


class _SharedVariables:
    """The variables of all towers. Those of get_variable are known by their names; those of tf.Variable and of Keras
    layers, created anew at each call, by their names and order.

    Attributes:
      creates: whether one is being created.
    """

    def __init__(self):
        self._created, self.creates = {}, False

    @contextlib.contextmanager
    def tower(self, index: int) -> Iterator[None]:
        """Makes the first tower's block create variables on the host, and later towers' blocks get them."""
        scope = v1.get_variable_scope()
        if not index:
            with tf.variable_creator_scope(self._create), v1.variable_scope(scope):
                yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(v1.name_scope(f"tower_{index}/"))
            stack.enter_context(tf.variable_creator_scope(self._recalling(f"tower_{index}")))
            stack.enter_context(v1.variable_scope(scope, reuse=v1.AUTO_REUSE, custom_getter=self._of_its_type))
            for variable in itertools.chain(*self._created.values()):  # the first tower alone moves averages and counts
                for name in ("assign", "assign_add", "assign_sub"):
                    stack.enter_context(compat.replaced(variable, name, _reading(variable)))
            yield

    def _create(self, create, **kwargs):
        self.creates = True
        with tf.device(HOST):
            variable = create(**kwargs)
        self.creates = False
        self._created.setdefault(kwargs.get("name"), []).append(variable)
        return variable

    def _of_its_type(self, getter, name, *args, **kwargs):
        """Gets variables whose type follows from an initial value, which reuse ignores; a custom getter."""
        if name in self._created:
            kwargs["dtype"] = self._created[name][0].dtype.base_dtype
        return getter(name, *args, **kwargs)

    def _recalling(self, tower: str):
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


def _reading(variable: tf.Variable) -> Callable:
    return lambda *args, **kwargs: tf.identity(variable)


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


class NonFiniteLossError(errors.NonFiniteError, v1.train.NanLossDuringTrainingError):
    """A loss or a gradient that is NaN or infinite, also by the library's name for it."""

    __str__ = Exception.__str__  # the library's contains only its name


class FiniteGuard(v1.train.SessionRunHook):
    """Stops at a step that was not finite, which has changed no variable.

    Attributes:
      finite: as of gradients.update_if_finite; None if a single tower updates its variables without an optimizer of
        TensorFlow's.
      checked: names of its columns.
    """

    finite: tf.Tensor | None = None
    checked: tuple[str, ...] = ()

    def before_run(self, run_context):
        if self.finite is not None:
            return v1.train.SessionRunArgs([self.finite, v1.train.get_global_step()])
        return None

    def after_run(self, run_context, run_values):
        if run_values.results is None:
            return
        finite, step = run_values.results
        if not finite.all():
            raise NonFiniteLossError(
                f"not finite at step {step + 1}: {gradients.not_finite(finite, self.checked)}. This step has not "
                "changed the variables, and the last checkpoint stays. Try a lower learning rate, or look at the "
                "examples."
            )


def train_step(
    specs: list[api.EstimatorSpec], captures: list[Captured], all_reduce: AllReduce, guard: FiniteGuard
) -> api.EstimatorSpec:
    """Makes one update for all towers.

    Args:
      specs: from build_towers in mode TRAIN.
      captures: from there too.
      all_reduce: averages between workers.
      guard: gets what it has to look at.

    Returns:
      The first tower's, with the mean of all towers' losses, and the op that does a step of all towers.

    Raises:
      GraphError: towers that cannot be averaged.
    """
    is_alone = captures[0].num_towers == 1
    losses = [tf.reshape(spec.loss, []) for spec in specs]
    loss = specs[0].loss
    if not is_alone:
        [[loss]] = all_reduce.mean([[tf.add_n(losses) / len(specs)]])
        for summary in v1.get_collection(v1.GraphKeys.SUMMARIES):
            if summary.op.type == "ScalarSummary" and summary.op.name == "loss":  # of the first tower
                compat.set_input(summary.op, 1, tf.cast(loss, summary.op.inputs[1].dtype))
    with tf.control_dependencies(losses):  # by then layers have read what is assigned, such as their seeds
        assigned = assign_merged(captures, all_reduce)
    counts = {len(captured.updates) for captured in captures}
    if is_alone and counts == {0}:
        return specs[0]._replace(train_op=tf.group(specs[0].train_op, assigned))
    if len(counts) > 1 or counts == {0}:
        raise errors.GraphError(
            f"model_fn called apply_gradients of a tf.compat.v1.train optimizer {sorted(counts)} times in its towers. "
            "Each tower must do so equally often, at least once: that is where gradients are averaged."
        )
    guard.finite, applied = _update_if_finite(losses, captures, loss, all_reduce, assigned)
    guard.checked = ("the loss", *(f"the gradient of {variable.op.name}" for _, variable in applied))
    for captured in captures:
        for update in captured.updates:
            compat.add_control_input(update.placeholder, guard.finite.op)  # ops that wait for it wait for the update
    op = tf.group(specs[0].train_op, guard.finite, assigned)
    # The optimizers' own ops are in a branch, where whoever loads this graph would not find them.
    v1.get_default_graph().get_collection_ref(v1.GraphKeys.TRAIN_OP)[:] = [op]
    return specs[0]._replace(loss=loss, train_op=op)


def _update_if_finite(losses: list[tf.Tensor], captures: list[Captured], loss: tf.Tensor, all_reduce, assigned):
    """Averages and applies the gradients, call by call, after what layers assign; returns what is finite, and the
    applied pairs looked at."""
    calls = list(zip(*[captured.updates for captured in captures], strict=True))
    averaged = [gradients.average_gradients([update.grads_and_vars for update in call]) for call in calls]
    if all_reduce.num_workers > 1:
        flat = [_of_known_shape(*pair) for means in averaged for pair in means]
        over_workers = iter(all_reduce.mean([flat])[0])
        averaged = [[(next(over_workers), variable) for _, variable in means] for means in averaged]
    tower_grads = [
        [p for update in c.updates if not update.looks_itself for p in update.grads_and_vars] for c in captures
    ]
    applied = [pair for call, mean in zip(calls, averaged, strict=True) if not call[0].looks_itself for pair in mean]

    def apply():
        return tf.group([call[0].apply(mean) for call, mean in zip(calls, averaged, strict=True)])

    # The first tower's updates were told to wait for these, such as its UPDATE_OPS.
    before = [assigned, *(op for call in calls for op in call[0].placeholder.control_inputs)]
    with tf.control_dependencies(before):
        return gradients.update_if_finite(zip(losses, tower_grads, strict=True), applied, loss, apply), applied


def _of_known_shape(grad: tf.Tensor | tf.IndexedSlices, variable: tf.Variable) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient of its variable's shape; of a sparse one, workers may have rows for any number of indices."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.ensure_shape(grad, variable.shape)
    values = tf.ensure_shape(grad.values, [None, *variable.shape[1:]])
    any_number = v1.placeholder_with_default(values, [None, *variable.shape[1:]])
    return tf.IndexedSlices(any_number, grad.indices, grad.dense_shape)
