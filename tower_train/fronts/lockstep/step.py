"""A step of a Keras model in towers, which meet where it updates, measures, assigns or joins rows.

The program of a step is written for one device: Keras' own, or a `train_step` of the model's. Outside of towers it does
what it says.
"""

import contextlib
import contextvars
import functools
import itertools
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tower_train import console, errors, normalization
from tower_train.fronts import compat, meeting, placement
from tower_train.fronts.keras_building import output_names
from tower_train.fronts.lockstep import layers, parts
from tower_train.fronts.lockstep.draws import drawn_for_more, rows_of_draw
from tower_train.fronts.lockstep.exchange import Exchange
from tower_train.fronts.lockstep.scope import TowerScope
from tower_train.fronts.meeting import Tower
from tower_train.graph import context, gradients, xla
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.random_state import ancestors

Program = Callable[[keras.Model, Any], Any]  # (model, batch) -> what the step returns
Update = tuple[keras.optimizers.Optimizer, GradientsAndVariables]

_current: contextvars.ContextVar["Step | Updates | None"] = contextvars.ContextVar("step", default=None)
_LONG_SECS = 10  # of silence before the first step
_NO_EXAMPLES = ("Shape", "ShapeN", "Size", "Unique")  # depend on no example's values


class Updates:
    """The updates of optimizers within a `with` block, in no tower: (optimizer, its gradients and variables)."""

    def __init__(self):
        self.updates: list[Update] = []

    def __enter__(self):
        self._token = _current.set(self)
        return self.updates

    def __exit__(self, *_):
        _current.reset(self._token)


class Rehearsal(Updates):
    """A run of a program on a whole batch, in no tower, in a graph that nobody runs: it creates the variables of
    layers, metrics and optimizers, and spreads the weights over the towers' devices."""

    def __init__(self, model: keras.Model, program: Program, data, towers: Sequence[str]):
        super().__init__()
        built = set(map(id, model.weights))
        specs = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), data)

        begun = []

        def run(batch):  # TensorFlow calls this once more if it has created variables: it takes as long, for nothing
            if not begun:
                begun.append(True)
                with tf.device(HOST):
                    program(model, batch)

        with self, compat.eager_mode(), tf.device(HOST):
            tf.function(run, autograph=False).get_concrete_function(specs)
            placement.spread(model, self.optimizers, towers, built)

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        return list({id(optimizer): optimizer for optimizer, _ in self.updates}.values())


class Step:
    """A step of a model, which has all its variables, on consecutive parts of a batch, of which this process's devices
    compute theirs; towers' rows are joined on merge_device. XLA compiles towers' passes if is_compiled. The losses of
    layers in `summed` are sums over examples."""

    def __init__(
        self, model: keras.Model, data, devices: Sequence[str], merge_device: str, exchange: Exchange,
        is_compiled: bool = False, batch_norm: str = "global", summed: Collection[layers.Key] = (),
    ):  # fmt: skip
        self._summed = summed
        self._model, self._exchange, self._device, self._is_compiled = model, exchange, merge_device, is_compiled
        here, count = len(devices), len(devices) * exchange.size
        self._parts = parts.split(data, here * exchange.rank, here, count)
        self._added_losses: list[dict[int, set]] = [{} for _ in devices]
        self._scopes = [_StepScope() for _ in devices]
        self._is_alone, self._is_weighted, self._is_first_turn = count == 1, False, True
        self._normalizes_by_tower = batch_norm == "tower"
        # Those of layers whose assignments are the same whatever the examples, or averages.
        known = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
        normalizing = [each for each in compat.sublayers(model) if isinstance(each, known)]
        self._expected = {id(variable) for layer in normalizing for variable in layer.variables}
        self._towers = meeting.Towers(
            devices, lambda of_towers: self.totals(list(zip(*of_towers, strict=True))), here * exchange.rank, count,
            inside=self._inside, turn=self._turn,
        )  # fmt: skip

    def run(self, program: Program) -> list:
        """Runs a program in all towers; returns over towers what it returned."""

        def to_the_end(tower: Tower):
            result = program(self._model, self._parts[tower.place].data)
            self.meet(None, lambda _: None, "the end of the step")
            return result

        with _entered(self), normalization.over_towers(), contextlib.ExitStack() as stack:
            for layer in compat.sublayers(self._model):
                if getattr(layer, "synchronized", False):  # over all towers as others are, and by no strategy
                    stack.enter_context(compat.replaced(layer, "synchronized", False))
            returned = self._towers.run(to_the_end)
        if self._is_compiled:
            xla.leave_out_other_devices(tf.compat.v1.get_default_graph())
        return returned

    @contextlib.contextmanager
    def _inside(self, tower: Tower) -> Iterator[None]:
        cuts, program = self._parts[tower.place].cuts, type(self._model).__name__ if not self._is_alone else ""
        is_off = lambda: meeting.current() is None  # noqa: E731
        drawn = drawn_for_more(functools.partial(rows_of_draw, cuts), program, itertools.count(), is_off)
        leaves = [leaf for leaf in tf.nest.flatten(self._parts[tower.place].data, True) if tf.is_tensor(leaf)]
        inputs = [leaf for leaf in leaves if leaf.shape.rank]
        mean = functools.partial(meeting.mean, what="batch normalisation")
        of_all = context.Context(towers=tower.count, by_tower=self._normalizes_by_tower, mean=mean)
        with (
            tf.name_scope(f"tower_{tower.index}/"),
            self._scopes[tower.place],
            drawn,
            of_all.enter_tower(inputs=inputs),
            layers.summed(self._summed, self._parts[tower.place].share),
            xla.compiled(self._is_compiled, tower.device, "tower"),
        ):
            yield

    @contextlib.contextmanager
    def _turn(self, tower: Tower) -> Iterator[None]:
        compat.take_losses(self._model, self._added_losses[tower.place])
        begun = time.monotonic()
        yield
        if self._is_first_turn:
            self._is_first_turn, secs = False, len(self._parts) * (time.monotonic() - begun)
            if len(self._parts) > 1 and secs > _LONG_SECS:
                console.notice_once(
                    self._model,
                    f"Before the first step Keras traces the model in each of {len(self._parts)} towers, which takes "
                    f"more than {secs:.0f} s, once.",
                )

    def rows(self, tensors: Sequence[Sequence]) -> list:
        """Joins the towers' rows of tensors, less those of towers without examples, and what Keras attached to them.

        tensors: of each, over towers. All travel together.
        """
        whole = []
        for values in tensors:
            local = [
                parts.rows_of(value, 0, tf.where(part.share > 0, parts.batch_size(value), 0))
                for part, value in zip(self._parts, values, strict=True)
            ]
            with tf.device(self._device):
                is_sparse = isinstance(local[0], tf.SparseTensor)
                whole.append(tf.sparse.concat(0, local) if is_sparse else tf.concat(local, 0))
        with tf.device(self._device):
            whole = self._exchange.rows(whole)
        attached = [[compat.attached(value) for value in values] for values in tensors]
        names = [(i, name) for i, of_towers in enumerate(attached) for name in of_towers[0]]
        joined = self.rows([[each[name] for each in attached[i]] for i, name in names]) if names else []
        for (i, name), each in zip(names, joined, strict=True):
            compat.attach(whole[i], {name: each})
        return whole

    def whole(self, of_towers: Sequence):
        """Returns the batch's value of a structure in the towers: of what is no tensor the first one."""
        leaves = list(zip(*map(keras.tree.flatten, of_towers), strict=True))
        found = {i: values[0] for i, values in enumerate(leaves)}
        tensors = [i for i, value in found.items() if tf.is_tensor(value)]
        scalars = [i for i in tensors if found[i].shape.rank == 0]
        others = [i for i in tensors if i not in scalars]
        found |= zip(scalars, self.totals([leaves[i] for i in scalars]), strict=True)
        found |= zip(others, self.rows([leaves[i] for i in others]), strict=True)
        return keras.tree.pack_sequence_as(of_towers[0], list(found.values()))

    def totals(self, values: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the means over examples of floating-point values, and the sums of others, over which there are those
        of the towers."""
        shares = [part.share for part in self._parts]

        def local(of_towers):
            weights = shares if of_towers[0].dtype.is_floating else map(tf.math.ceil, shares)
            return tf.add_n([tf.cast(w, v.dtype) * v for w, v in zip(weights, of_towers, strict=True)])

        return self._exchange.sum([local(of_towers) for of_towers in values])

    def gradient_of_rows(self, grads: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns over towers the gradient of their rows of a joined tensor, whose gradients in the towers are `grads`:
        such that the mean over examples of what depends on it is that of the whole batch."""
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        [total] = self._exchange.sum([tf.add_n(dense)]) if self._is_weighted else self.totals([dense])
        counts = [tf.where(part.share > 0, count, 0) for part, count in zip(self._parts, rows, strict=True)]
        [of_all] = self._exchange.rows([tf.stack(counts)])
        begins = tf.unstack(
            tf.cumsum(of_all, exclusive=True)[len(rows) * self._exchange.rank :][: len(rows)], len(rows)
        )
        of_towers = [total[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        if self._is_weighted:
            return of_towers
        shares = [tf.cast(part.share, total.dtype) for part in self._parts]
        return [tf.math.divide_no_nan(grad, share) for grad, share in zip(of_towers, shares, strict=True)]

    def _gradients_of_means(self, of_towers: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """As meeting.Towers.gradients_of_means, of losses that are weighted by examples."""
        sums = self._exchange.sum([tf.add_n(grads) for grads in zip(*of_towers, strict=True)])
        return [[total * tf.cast(part.share, total.dtype) for total in sums] for part in self._parts]

    def weighted(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns a tower's loss by the share of its examples. From then on gradients are of such losses: they are
        added, and those of joined rows stay as small in float16 as one device's."""
        self._is_weighted, self._towers.gradients_of_means = True, self._gradients_of_means
        return loss * tf.cast(self._parts[meeting.current().place].share, loss.dtype)

    def mean_gradients(self, of_towers: Sequence[GradientsAndVariables]) -> GradientsAndVariables:
        """Returns the gradients of the whole batch's loss, the towers' mean weighted by their examples, with the slices
        that one device would have; of variables that have one."""
        of_towers = gradients.with_gradients(of_towers)  # names variables without gradients
        if self._is_alone:
            return of_towers[0]
        dtypes = {
            id(v): layer.compute_dtype for layer in compat.sublayers(self._model) for v in layer.trainable_weights
        }
        trained = []
        for pairs in zip(*of_towers, strict=True):
            with tf.device(placement.of(variable := pairs[0][1])):
                trained.append((self._weighted([grad for grad, _ in pairs]), variable))
        slices = [grad for grad, _ in trained if isinstance(grad, tf.IndexedSlices)]
        rows = iter(self._exchange.rows([part for each in slices for part in (each.values, each.indices)]))
        sums = iter(self._exchange.sum([grad for grad, _ in trained if not isinstance(grad, tf.IndexedSlices)]))
        total = []
        for grad, variable in trained:
            if isinstance(grad, tf.IndexedSlices):
                whole = tf.IndexedSlices(next(rows), next(rows), grad.dense_shape)
                whole = whole if _are_of_examples(grad.indices) else gradients.sum_rows(whole)
            else:
                whole = next(sums)
                if dtypes.get(id(variable)) == "float16":  # one device sums in float16, where the sum may overflow
                    whole = tf.cast(tf.cast(whole, tf.float16), whole.dtype)
            total.append((whole, variable))
        return total

    def _weighted(self, grads: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
        shares = [1.0 if self._is_weighted else part.share for part in self._parts]
        shares = [tf.cast(share, grad.dtype) for share, grad in zip(shares, grads, strict=True)]
        if not all(isinstance(grad, tf.IndexedSlices) for grad in grads):
            return tf.add_n([share * tf.convert_to_tensor(grad) for share, grad in zip(shares, grads, strict=True)])
        values = tf.concat([share * grad.values for share, grad in zip(shares, grads, strict=True)], 0)
        return tf.IndexedSlices(values, tf.concat([grad.indices for grad in grads], 0), grads[0].dense_shape)

    def meet(self, mine: Any, merge: Callable[[list], Any], what: str):
        """As meeting.meet, once what the towers have assigned until then is done."""

        def merge_all(asked: list[tuple]):
            self._assign([noted for noted, _ in asked])
            return merge([each for _, each in asked])

        return meeting.meet((self._scopes[meeting.current().place].take(), mine), merge_all, what)

    def _assign(self, of_towers: Sequence[dict[int, tuple[keras.Variable, tf.Tensor]]]) -> None:
        """Assigns what the towers do: the mean over examples to floating-point variables such as moving averages, the
        first tower's value to others. A line names variables of which it is unknown what one device would make."""
        assigned = of_towers[0]
        averaged = [key for key, (_, value) in assigned.items() if value.dtype.is_floating]
        others = [key for key in assigned if key not in averaged]
        means = self.totals([[noted[key][1] for noted in of_towers] for key in averaged])
        firsts = self._exchange.first([assigned[key][1] for key in others])
        for key, value in zip([*averaged, *others], [*means, *firsts], strict=True):
            variable, _ = assigned[key]
            variable.assign(value)
            if not (self._is_alone or key in self._expected or compat.is_seed_state(variable)):
                what = "the mean of what the towers assign" if key in averaged else "what the first tower assigns"
                console.notice_once(
                    variable,
                    f"{variable.path} gets {what}, each for its part of the batch: one device may differ. In a "
                    "train_step call steps.once(function) with a function that assigns.",
                )

    def once(self, function: Callable[[], Any]):
        """Calls the function; what it assigns and returns is what it assigns and returns in the first of all towers."""
        if self._exchange.size == 1:
            return function()
        with TowerScope([]) as scope:
            returned = function()
        values = [*(value for _, value in scope.assigned.values()), *keras.tree.flatten(returned)]
        of_first = iter(self._exchange.first([value for value in values if tf.is_tensor(value)]))
        values = [next(of_first) if tf.is_tensor(value) else value for value in values]
        for (variable, _), value in zip(scope.assigned.values(), values, strict=False):
            variable.assign(value)
        return keras.tree.pack_sequence_as(returned, values[len(scope.assigned) :])

    def logs(self, returned: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Merges what the towers' own steps returned: the means over this batch's examples, which of a metric's result
        is the result; ConfigError if they returned something else than a dict of scalars."""
        logs = returned[0]
        if not isinstance(logs, dict) or not logs or any(keras.ops.ndim(each) for each in keras.tree.flatten(logs)):
            raise errors.ConfigError(
                f"{type(self._model).__name__}.train_step returns {logs}; give a dict of scalars to report, such as "
                '{"loss": loss}: means over the examples.'
            )
        as_floats = [
            [tf.cast(each, keras.config.floatx()) for each in keras.tree.flatten(of_tower)] for of_tower in returned
        ]
        return keras.tree.pack_sequence_as(logs, self.totals(list(zip(*as_floats, strict=True))))


class _StepScope(TowerScope):
    """The scope of a tower's program between two meetings."""

    def __init__(self):
        super().__init__([])

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return compat.storage(variable) if value is None else value

    def add_update(self, update):
        if meeting.can_meet():
            super().add_update(update)
        elif meeting.current().place == 0:  # in a loop or a branch, such as the state of a layer that draws there
            compat.assign_here(*update)

    def take(self) -> dict[int, tuple[keras.Variable, tf.Tensor]]:
        """Returns what was assigned; from then on variables have their own values."""
        assigned, self.assigned = self.assigned, {}
        self.state_mapping.clear()
        return assigned


@contextlib.contextmanager
def _entered(run: Step) -> Iterator[None]:
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def _running() -> Step | None:
    """Returns the step whose program runs in this tower; None outside of towers, and within a meeting."""
    return _current.get() if meeting.current() else None


def join(tensors):
    """Returns the rows of all towers, in the order of the batch, on each tower's device; gradients go to the towers of
    the rows. Outside of towers, the tensors.

    Args:
      tensors: a tensor [rows, ...] or a structure of them.
    """
    step = _running()
    if step is None:
        return tensors
    mine = keras.tree.map_structure(parts.as_tensor, tensors)
    if any(leaf is not None and leaf.shape.rank == 0 for leaf in keras.tree.flatten(mine)):
        raise errors.ConfigError("steps.join got a scalar; join tensors that have a row for each example.")
    return _join(step, mine)


def join_batch(model: keras.Model, x, y, y_pred, sample_weight, needs_x: bool):
    """As `join`, of a batch and a model's outputs for it, of which scalars are means over examples.

    Raises ConfigError for an output whose first axis is not the batch; where that is known in the step only, it fails
    with a message that `explained` finds.
    """
    step = _running()
    if step is None:
        return x, y, y_pred, sample_weight
    if meeting.current().count > 1:
        inputs = [parts.batch_size(leaf) for leaf in keras.tree.flatten(x) if leaf is not None and leaf.shape.rank]
        for name, output in zip(output_names(model, y_pred), keras.tree.flatten(y_pred), strict=True):
            if isinstance(output, tf.Tensor) and output.shape.rank:
                _check_rows(f"{type(model).__name__}: the output {name}", output, inputs)
    return _join(step, keras.tree.map_structure(parts.as_tensor, (x if needs_x else None, y, y_pred, sample_weight)))


_REMARKS = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m.*", re.DOTALL)  # of Keras
_OTHER_ROWS = (
    "has an axis before that of the examples, or none, and towers join outputs by examples. Put the batch first, "
    "such as [batch, time] or [batch, 2]; a scalar is a mean over the examples. Or train on one device: gpus=1."
)


def _check_rows(what: str, output: tf.Tensor, inputs: Sequence[parts.Size]) -> None:
    """Refuses an output whose rows are not those of a batch's examples, or a fixed number for each."""
    rows, message = parts.batch_size(output), f"{what} of shape {output.shape} {_OTHER_ROWS}"
    known = [size for size in inputs if isinstance(size, int)]
    if isinstance(rows, int) and not any(rows % size == 0 for size in known):
        raise errors.ConfigError(message)
    if not isinstance(rows, int):  # in a tf.function an assertion is made by itself
        fits = tf.reduce_any(tf.stack([rows % size == 0 for size in inputs]))
        tf.debugging.Assert(fits, [message])


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises a ConfigError for a step within this block whose outputs have other rows than examples, or with a layer
    that does not take its inputs; takes from a user's error what Keras puts around it: where it was, and arguments."""
    try:
        yield
    except ValueError as error:
        wrapped = _REMARKS.fullmatch(str(error))
        if wrapped and isinstance(error, errors.UserError):
            error.args = wrapped.groups()
        elif wrapped and "incompatible with the layer" in wrapped[1]:
            raise errors.ConfigError(
                f"multi_gpu_model: {wrapped[1].rstrip('.')}. Give the layer such inputs, or make it for these."
            ) from None
        raise
    except tf.errors.InvalidArgumentError as error:
        if found := re.search(rf"assertion failed: \[(.*? {re.escape(_OTHER_ROWS)})\]", error.message, re.DOTALL):
            raise errors.ConfigError(found[1]) from None
        raise


def _join(step: Step, mine):
    whole = step.meet(mine, step.whole, "steps.join")
    return keras.tree.map_structure(functools.partial(_joined, step), mine, whole)


def _joined(step: Step, mine, whole):
    """Returns a tower's copy of a joined tensor, with its gradient and what Keras attached to it."""
    if not isinstance(mine, tf.Tensor):
        return whole

    def gradient(grad):
        if mine.shape.rank == 0:
            return meeting.gradients_of_means([grad], "a mean")[0]
        merge = lambda asked: step.gradient_of_rows(*zip(*asked, strict=True))  # noqa: E731
        over_towers = step.meet((grad, tf.shape(mine)[0]), merge, "the gradient of steps.join")
        of_mine = over_towers[meeting.current().place]
        missing = tf.shape(mine)[0] - tf.shape(of_mine)[0]  # of a tower without examples
        of_mine = tf.pad(of_mine, [[0, missing], *[[0, 0]] * (mine.shape.rank - 1)])
        return tf.ensure_shape(of_mine, mine.shape)

    copy = tf.custom_gradient(lambda _: (tf.identity(whole), gradient))(mine)
    attached = compat.attached(mine)
    compat.attach(copy, {name: _joined(step, attached[name], each) for name, each in compat.attached(whole).items()})
    return copy


def weighted(loss: tf.Tensor) -> tf.Tensor:
    """Returns a loss, which each tower computes of joined rows, by the share of its examples: see Step.weighted."""
    step = _running()
    return loss if step is None else step.weighted(loss)


def once(function: Callable[[], Any]):
    """Calls a function once and not in every tower, such as one that assigns to variables; returns its result in each.

    Code after it sees the new values. Values that the function uses are the first tower's, or from a `join`.
    """
    step = _running()
    return function() if step is None else step.meet(None, lambda _: step.once(function), "steps.once")


def _updating(method: Callable, _) -> Callable:
    """Makes a method apply_gradients(pairs) or apply(gradients, variables) that of all towers, where they call it."""

    def pairs_of(optimizer, grads, variables) -> GradientsAndVariables:
        if method.__name__ == "apply_gradients":
            return list(grads)
        return list(zip(grads, compat.trained_by(optimizer) if variables is None else variables, strict=True))

    def call(optimizer, pairs: GradientsAndVariables):
        return method(optimizer, *([pairs] if method.__name__ == "apply_gradients" else zip(*pairs, strict=True)))

    @functools.wraps(method)
    def of_all(optimizer, grads, *args, **kwargs):
        run = _current.get()
        if not isinstance(run, Updates) and _running() is None:
            return method(optimizer, grads, *args, **kwargs)
        pairs = pairs_of(optimizer, grads, *(args or kwargs.values() or [None]))
        if isinstance(run, Updates):
            run.updates.append((optimizer, pairs))
            return call(optimizer, pairs)
        merge = lambda asked: call(optimizer, run.mean_gradients(asked) or asked[0])  # noqa: E731
        return run.meet(pairs, merge, f"{method.__name__} of {type(optimizer).__name__}")

    return of_all


def _measuring(update_state: Callable, _) -> Callable:
    """Makes a metric's update_state one of all rows, and of scalars' totals, where towers call it."""

    @functools.wraps(update_state)
    def of_all(metric, *args, **kwargs):
        step = _running()
        if step is None:
            return update_state(metric, *args, **kwargs)

        def merge(asked):
            args, kwargs = step.whole(asked)
            return update_state(metric, *args, **kwargs)

        return step.meet((args, kwargs), merge, f"update_state of {metric.name}")

    return of_all


for _name in ("apply_gradients", "apply"):
    compat.wrap_method(compat.BaseOptimizer, _name, _updating)
compat.wrap_method(keras.metrics.Metric, "update_state", _measuring)


def _are_of_examples(indices: tf.Tensor) -> bool:
    """Returns whether one device too has a row once for each use by an example, which Keras' Adam squares one by one.

    Other rows are of no examples, as positions', or unique, as those of a sparse input's product.
    """
    constants = {id(inside) for outside, inside in indices.graph.captures if hasattr(outside, "numpy")}
    begun = [op.outputs[0] for op in ancestors([indices.op], but=_NO_EXAMPLES) if op.type == "Placeholder"]
    return any(id(tensor) not in constants or tensor.dtype == tf.resource for tensor in begun)
