"""A model_fn called once per tower, with the same variables in all."""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors, normalization
from tower_train.fronts import compat, meeting, parts, placement
from tower_train.fronts.draws import draw_whole, drawn_for_more, rows_of_draw
from tower_train.fronts.tf_estimator.library import api
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import random_state, xla
from tower_train.graph.devices import HOST

v1 = tf.compat.v1


def assign(pairs) -> tf.Operation:
    """Returns the op that assigns values to variables; none if there is no input for one of the values.

    Args:
      pairs: (variable of the graph, new value).
    """
    pairs = list(pairs)
    with tf.control_dependencies([value for _, value in pairs]):
        return tf.group([variable.assign(value, read_value=False) for variable, value in pairs])


class ModelTowers:
    """The towers of one call of an Estimator's model_fn, which makes the variables, on the host or spread over the
    towers' GPUs unless it says where. Hooks know ops of its tower by the model's own names.

    Args:
      training: of these towers.
      devices: over towers, a device string.
      batches: over towers, (features, labels).
      seed: of the initial values that Keras layers draw; None for another one each time.
    """

    def __init__(self, training: Training, devices: Sequence[str], batches: Sequence[tuple], seed: int | None):
        self._training, self._batches, self._seed = training, list(batches), seed
        self._assignments: list[tf.Operation] = []  # of what is noted there
        self._num_assigned = 0
        self._creating: list[str] = []  # just now
        self._balance = placement.Balance(devices)
        first, count = training.worker * len(devices), len(devices) * training.all_reduce.num_workers
        self._cuts = self._cuts_of_all(first, count) if count > 1 else []
        self._towers = meeting.Towers(devices, first, count, owner=training)

    def call(self, model_fn: Callable, mode: str) -> api.EstimatorSpec:
        """Calls model_fn(features, labels), in all towers.

        Returns its spec; in training with the mean of all towers' losses, and with what Keras layers assign.

        Raises:
          GraphError: towers that cannot be averaged; the message names what differs.
        """
        if mode == api.ModeKeys.TRAIN:
            self._training.before_update = self._assign_noted

        def program():
            batch = self._towers.mine(self._batches)
            with self._inside(batch):
                return model_fn(*batch)

        with normalization.over_towers():
            spec = self._towers.run(program)
        if self._training.is_compiled:
            xla.leave_out_other_devices(v1.get_default_graph())
        if mode != api.ModeKeys.TRAIN:
            return spec
        on_host = [each for each in v1.trainable_variables() if placement.of(each) == HOST]
        self._balance.tell_cost(self._training, "model_fn", on_host)
        losses = [tf.reshape(each, []) for each in self._towers.over_towers(spec.loss)]
        if self._training.num_towers > 1:
            if not self._training.averages.have_met:
                raise errors.GraphError(
                    "model_fn computes no gradients of variables outside of branches and loops: nothing is averaged "
                    "over its towers. Compute them by an optimizer, tf.gradients or a tf.GradientTape."
                )
            spec = spec._replace(loss=self._training.averages.total(losses))
            for summary in v1.get_collection(v1.GraphKeys.SUMMARIES):
                if summary.op.type == "ScalarSummary" and summary.op.name == "loss":
                    compat.set_input(summary.op, 1, tf.cast(spec.loss, summary.op.inputs[1].dtype))
        with tf.control_dependencies(losses):
            self._assign_noted()
        if self._assignments:
            spec = spec._replace(train_op=tf.group(spec.train_op, *self._assignments))
        return spec

    @contextlib.contextmanager
    def _inside(self, batch: tuple) -> Iterator[None]:
        """Calls of model_fn draw by example, and keep Keras layers from assigning."""
        towers = self._towers

        def assign_later(assign, variable, value):
            if meeting.current() is None:  # an optimizer's update
                return assign(variable, value)
            return towers.assigned.append((variable.value, tf.cast(value, variable.value.dtype)))

        # One tower's may be no data set's, and a dict with keys that cannot be sorted.
        leaves = tf.nest.flatten(batch, expand_composites=True) if towers.count > 1 else []
        inputs, scope = [each for each in leaves if tf.is_tensor(each)], v1.get_variable_scope()
        with (
            compat.fresh_layer_names(),  # so that a checkpoint fits each graph of a model
            compat.intercepted_assignments(assign_later),
            self._drawn_by_example(batch) as towers.draws,
            self._training.averages.inside(towers, inputs, self._training.batch_norm),
            _python_seeded(self._seed),
            tf.variable_creator_scope(self._creator()),
            # The dtype of a comparison in float64, else the scope's own.
            v1.variable_scope(scope, dtype=compat.floatx_here()),
            xla.compiled(self._training.is_compiled, towers.device, "tower"),
        ):
            yield

    def _cuts_of_all(self, first: int, count: int) -> list[list[parts.Cut]]:
        """Returns over this worker's towers, how tensors of all towers' batches, labels first, are cut into theirs; and
        weighs towers in the training's means by the rows of the first tensor."""
        here = [parts.sizes((labels, features)) for features, labels in self._batches]
        all_sizes, after = here, first + len(here)
        if here[0] and after - first < count:
            rows = self._training.sum(tf.pad(tf.convert_to_tensor(here), [[first, count - after], [0, 0]]))
            all_sizes = [tf.unstack(each) for each in tf.unstack(rows)]
            all_sizes[first:after] = here  # which may be static
        sizes = [list(each) for each in zip(*all_sizes, strict=True)]
        if sizes and not (all(isinstance(size, int) for size in sizes[0]) and len(set(sizes[0])) == 1):
            examples = tf.cast(tf.stack(sizes[0]), tf.float64)
            shares = examples * self._training.all_reduce.num_workers / tf.reduce_sum(examples)
            self._training.averages = self._training.weighted(tf.unstack(shares)[first:after])
        return [[parts.Cut(each[i], sum(each[:i]), sum(each), each[i]) for each in sizes] for i in range(first, after)]

    def _drawn_by_example(self, batch: tuple):
        """As drawn_for_more, of the rows that a tower's tensors have among those of all towers; of none if it is
        alone."""
        cuts = self._towers.mine(self._cuts) if self._cuts else []
        lengths, program = parts.lengths(batch) if cuts else [], "model_fn" if cuts else ""
        rows = functools.partial(rows_of_draw, cuts, lengths)
        return drawn_for_more(rows, program, itertools.count(), lambda: bool(self._creating) or not meeting.current())

    def _creator(self) -> Callable:
        """Returns the creator of variables."""
        scopes = compat.device_scopes()

        def create(create_variable, **kwargs):
            if tf.is_tensor(value := kwargs.get("initial_value")):
                kwargs["initial_value"] = value = tf.identity(value)  # what draws it may be of another number of rows
                draw_whole(random_state.ancestors([value.op]), self._towers.draws)
            self._creating.append(kwargs.get("name"))
            is_placed = meeting.current() and compat.device_scopes() > scopes  # by the program; slots by their variable
            is_weight = not tf.executing_eagerly() and tf.as_dtype(kwargs["dtype"] or tf.float32).is_floating
            device = self._balance.next() if is_weight else HOST
            with contextlib.nullcontext() if is_placed else tf.device(device):
                variable = create_variable(**kwargs)
            self._balance.add(variable)
            self._creating.pop()
            return variable

        return create

    def _assign_noted(self) -> list[tf.Operation]:
        """Assigns what Keras layers do, as far as that is not done: the mean over the towers of all workers to
        floating-point variables such as moving averages, the first tower's value to others such as seeds. By the ops
        that this waits for, layers must have read what is assigned. Returns the ops."""
        noted = self._towers.assigned[self._num_assigned :]
        self._num_assigned += len(noted)
        floating = [i for i, (variable, _) in enumerate(noted) if variable.dtype.is_floating]
        mine = [tf.ensure_shape(noted[i][1], noted[i][0].shape) for i in floating]
        means = self._training.averages.means(self._towers.over_towers(mine))
        values = dict(zip(floating, means, strict=True))
        if noted:
            self._assignments.append(
                assign((variable, values.get(i, value)) for i, (variable, value) in enumerate(noted))
            )
        return self._assignments


@contextlib.contextmanager
def _python_seeded(seed: int | None) -> Iterator[None]:
    """Seeds Python's random numbers, with which Keras seeds its initializers, within this block."""
    state = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
