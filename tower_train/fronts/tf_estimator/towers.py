"""A model_fn called once per tower, with the same variables in all."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tower_train import errors, normalization
from tower_train.fronts import compat, meeting, parts, placement
from tower_train.fronts.draws import draw_whole, drawn_for_more
from tower_train.fronts.meeting import Tower
from tower_train.fronts.tf_estimator.library import api
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import collectives, random_state, xla
from tower_train.graph.devices import HOST

v1 = tf.compat.v1
# Each tower has its own: its total loss must not contain another's losses.
_OF_ONE_TOWER = (v1.GraphKeys.LOSSES, v1.GraphKeys.UPDATE_OPS, v1.GraphKeys.SUMMARIES)


class ModelTowers(meeting.Towers):
    """The towers of one call of an Estimator's model_fn. The first one creates the variables, on the host or spread
    over the towers' GPUs, unless the program says where; later ones get the same. It has no name scope, so that hooks
    know its ops by the model's own names.

    Args:
      training: of these towers.
      devices: over towers, a device string.
      batches: over towers, (features, labels).
      seed: of the initial values that Keras layers draw; None for another one each time.
    """

    def __init__(self, training: Training, devices: Sequence[str], batches: Sequence[tuple], seed: int | None):
        self._training, self._batches = training, list(batches)
        self._assignments: list[tf.Operation] = []  # of what Keras layers assign
        self._num_assigned = 0
        self._created: dict[str, list[tf.Variable]] = {}  # by the first tower, by name
        self._creating: list[str] = []  # just now
        graph = v1.get_default_graph()
        self._collections = [{key: graph.get_collection(key) for key in _OF_ONE_TOWER}]
        self._collections += [{key: [] for key in _OF_ONE_TOWER} for _ in devices[1:]]
        state = random.getstate() if seed is None else random.Random(seed).getstate()
        self._random = [state for _ in devices]
        self._balance = placement.Balance(devices)
        first, count = training.worker * len(devices), len(devices) * training.all_reduce.num_workers
        self._sizes = self._sizes_of_all(first, count) if count > 1 else []
        super().__init__(devices, first, count, training)

    def call(self, model_fn: Callable, mode: str) -> api.EstimatorSpec:
        """Calls model_fn(features, labels) in all towers.

        Returns the first tower's spec; in training with the mean of all towers' losses, and with what Keras layers
        assign.

        Raises:
          GraphError: towers that cannot be averaged; the message names what differs.
        """
        if mode == api.ModeKeys.TRAIN:
            self._training.before_update = self._assign_noted
        normalization.replace_functions()
        specs = self.run(lambda tower: model_fn(*self._batches[tower.place]))
        if self._training.is_compiled:
            xla.leave_out_other_devices(v1.get_default_graph())
        spec, num_towers = specs[0], self._training.num_towers
        if mode != api.ModeKeys.TRAIN:
            return spec
        on_host = [each for each in v1.trainable_variables() if placement.of(each) == HOST]
        self._balance.tell_cost(self._training, "model_fn", on_host)
        losses = [tf.reshape(each.loss, []) for each in specs]
        if num_towers > 1:
            if not self._training.averages.have_met:
                raise errors.GraphError(
                    "model_fn computes no gradients of variables outside of branches and loops: nothing is averaged "
                    "over its towers. Compute them by an optimizer, tf.gradients or a tf.GradientTape."
                )
            spec = spec._replace(loss=self._training.averages.total(losses))
            for summary in v1.get_collection(v1.GraphKeys.SUMMARIES):
                if summary.op.type == "ScalarSummary" and summary.op.name == "loss":  # of the first tower
                    compat.set_input(summary.op, 1, tf.cast(spec.loss, summary.op.inputs[1].dtype))
        with tf.control_dependencies(losses):
            self._assign_noted()
        if self._assignments:
            spec = spec._replace(train_op=tf.group(spec.train_op, *self._assignments))
        return spec

    @contextlib.contextmanager
    def turn(self, tower: Tower) -> Iterator[None]:
        """Gives a tower its own collections, and its own state of Python's random numbers, with which Keras seeds its
        initializers."""
        state, mine = random.getstate(), self._collections[tower.place]
        random.setstate(self._random[tower.place])
        for key, values in mine.items():
            v1.get_collection_ref(key)[:] = values
        try:
            yield
        finally:
            self._random[tower.place] = random.getstate()
            random.setstate(state)
            mine |= {key: v1.get_collection(key) for key in mine}
            for key, values in self._collections[0].items():
                v1.get_collection_ref(key)[:] = values

    @contextlib.contextmanager
    def inside(self, tower: Tower) -> Iterator[None]:
        """Calls of model_fn in a tower draw by example, share variables, and keep Keras layers from assigning."""
        reuse = v1.AUTO_REUSE if tower.place else None

        def assign_later(assign, variable, value):
            tower.assigned.append((variable.value, tf.cast(value, variable.value.dtype)))

        # One tower's may be no data set's, and a dict with keys that cannot be sorted.
        batch = tf.nest.flatten(self._batches[tower.place], expand_composites=True) if tower.count > 1 else []
        inputs, scope = [each for each in batch if tf.is_tensor(each)], v1.get_variable_scope()
        shared, prefix = functools.partial(self._get, tower), f"tower_{tower.place}/"
        with (
            compat.fresh_layer_names(),  # so that a checkpoint fits each graph of a model
            compat.intercepted_assignments(assign_later),
            self._drawn_by_example(tower) as tower.draws,
            self._training.averages.inside(tower, inputs, self._training.batch_norm),
            v1.name_scope(prefix) if tower.place else contextlib.nullcontext(),
            compat.collections_without(prefix) if tower.place else contextlib.nullcontext(),
            # The first tower alone moves averages and counts.
            compat.assigning_nothing() if tower.place else contextlib.nullcontext(),
            tf.variable_creator_scope(self._creator(tower)),
            # The dtype of a comparison in float64, else the scope's own.
            v1.variable_scope(scope, reuse=reuse, custom_getter=shared, dtype=compat.floatx_here()),
            xla.compiled(self._training.is_compiled, tower.device, "tower"),
        ):
            yield

    def _sizes_of_all(self, first: int, count: int) -> list[list[parts.Size]]:
        """Returns over the tensors of a batch, labels first, the rows that the towers of all workers have of them; and
        weighs towers in the training's means by those of the first."""
        here = [parts.sizes((labels, features)) for features, labels in self._batches]
        all_sizes, after, num_workers = here, first + len(here), self._training.all_reduce.num_workers
        if here[0] and after - first < count:
            rows = tf.pad(tf.convert_to_tensor(here), [[first, count - after], [0, 0]])
            rows = collectives.reduce(rows, num_workers, f"{self._training.name} sum")
            all_sizes = [tf.unstack(each) for each in tf.unstack(rows)]
            all_sizes[first:after] = here  # which may be static
        sizes = [list(each) for each in zip(*all_sizes, strict=True)]
        if sizes and not (all(isinstance(size, int) for size in sizes[0]) and len(set(sizes[0])) == 1):
            examples = tf.cast(tf.stack(sizes[0]), tf.float64)
            shares = examples * num_workers / tf.reduce_sum(examples)
            self._training.averages.shares = tf.unstack(shares)[first:after]
        return sizes

    def _drawn_by_example(self, tower: Tower):
        """As drawn_for_more, of the rows that a tower's tensors have among those of all towers; of none if it is
        alone."""
        cuts = [
            parts.Cut(sizes[tower.index], sum(sizes[: tower.index]), sum(sizes), sizes[tower.index])
            for sizes in self._sizes
        ]
        # A number in the program is of a tower's batch, never of all.
        return drawn_for_more(cuts, self._batches[tower.place], False, lambda: bool(self._creating))

    def _creator(self, tower: Tower) -> Callable:
        """Returns the creator of a tower's variables. Those of get_variable are known by their names; those of
        tf.Variable and of Keras layers, created anew at each call, by their names and order."""
        got: dict[str, int] = {}  # how many of a name this tower has
        scopes = compat.device_scopes()

        def create(create_variable, **kwargs):
            name = kwargs.get("name")
            number, there = got.get(name, 0), self._created.setdefault(name, [])
            got[name] = number + 1
            if number < len(there):
                return there[number]
            if tower.place:
                raise errors.GraphError(
                    f"tower_{tower.place} would create the variable {name!r}, which the first tower did not create. "
                    "model_fn must create the same variables each time it is called."
                )
            if tf.is_tensor(value := kwargs.get("initial_value")):
                kwargs["initial_value"] = value = tf.identity(value)  # what draws it may be of another number of rows
                draw_whole(random_state.ancestors([value.op]), tower.draws)
            self._creating.append(name)
            is_placed = meeting.current() and compat.device_scopes() > scopes  # by the program; slots by their variable
            is_weight = not tf.executing_eagerly() and tf.as_dtype(kwargs["dtype"] or tf.float32).is_floating
            device = self._balance.next() if is_weight else HOST
            with contextlib.nullcontext() if is_placed else tf.device(device):
                variable = create_variable(**kwargs)
            self._balance.add(variable)
            self._creating.pop()
            there.append(variable)
            return variable

        return create

    def _get(self, tower: Tower, getter: Callable, name: str, shape=None, dtype=tf.float32, *args, **kwargs):
        if tower.place and self._created.get(name):  # its type may follow from an initial value, which reuse ignores
            dtype = self._created[name][0].dtype.base_dtype
        return getter(name, shape, dtype, *args, **kwargs)

    def _assign_noted(self) -> list[tf.Operation]:
        """Assigns what the Keras layers of all towers have come to since the last call: the mean over the towers of
        all workers to floating-point variables such as moving averages, the first tower's value to others such as
        seeds. By the ops that this waits for, layers must have read what is assigned. Returns the ops of all calls."""
        noted = [tower.assigned[self._num_assigned :] for tower in self.towers]
        self._num_assigned += len(noted[0])
        floating = [[(v, value) for v, value in mine if v.dtype.is_floating] for mine in noted]
        means = self._training.averages.means([[tf.ensure_shape(value, v.shape) for v, value in m] for m in floating])
        pairs = [(v, mean) for (v, _), mean in zip(floating[0], means, strict=True)]
        pairs += [(v, value) for v, value in noted[0] if not v.dtype.is_floating]
        if pairs:
            with tf.control_dependencies([value for _, value in pairs]):  # nothing is assigned without an input
                assigned = [variable.assign(value, read_value=False) for variable, value in pairs]
            self._assignments.append(tf.group(assigned))
        return self._assignments
