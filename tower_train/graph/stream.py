"""An endless, seeded stream of positions, each of one example.

Position p belongs to epoch p // n and to example permutation(seed, epoch)[p % n]. Nothing is buffered and nothing
depends on the number of towers, so the number of examples seen is a run's position.

A data set with an order of its own keeps that order; then only its iterator knows the position, and its state goes into
the checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import host
from tower_train.examples import Examples, Tensors, in_fixed_order
from tower_train.graph import iterator_state, shards, staging
from tower_train.graph.devices import HOST
from tower_train.graph.layout import Layout
from tower_train.graph.order import PositionDraws
from tower_train.graph.transfer import Transfer, preprocess
from tower_train.workload import Workload

_PREFETCHED_STEPS = 2
_MOST_PARALLEL_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches for all towers.

    Attributes:
      batches: a list over towers of (features, labels); each session.run consumes one step of all of them.
      initializer: op that puts the stream at its start; run it after variables hold their values.
      firsts: over towers, int64 scalar, its first example: in training its position, if `start` counts the examples
        seen before the step, in evaluation its index.
      state: to save and restore, if the start does not determine it; else None.
      renewal: ops that each step must run before it counts, which fetch the next step's batches; none if fetching a
        batch advances the stream.
      notes: lines on the place of preprocessing and on workers' shares of the examples.
      order: digest of the order that workers have in common; empty if they need none.
    """

    batches: list[tuple[Tensors, Tensors]]
    initializer: tf.Operation
    firsts: list[tf.Tensor]
    state: iterator_state.IteratorState | None = None
    renewal: Sequence[tf.Operation] = ()
    notes: tuple[str, ...] = ()
    order: str = ""

    @property
    def arrivals(self) -> list:
        """Returns ops or tensors that are done once the input that a step fetches has come."""
        return list(self.renewal) or tf.nest.flatten(self.batches)

    def renewed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the same tensor, once the next step's batches are in their place."""
        if not self.renewal:
            return tensor
        with tf.device(HOST), tf.control_dependencies(self.renewal):
            return tf.identity(tensor)


def training_stream(
    workload: Workload, examples: Examples, seed: int, start: tf.Tensor, layout: Layout, way: Transfer | None = None
) -> Stream:
    """Makes the stream from position `start` (int64 scalar) on.

    Tower i of a step that begins at position p gets the positions from p + i * tower_batch on, counted over the towers
    of all workers, worker 0's first. Examples in their own order take those positions in that order, except those of
    files, of which each worker has its own order.

    Args:
      workload, examples, seed, start, layout: what to train on.
      way: of the batches to their devices; None: they stay on the host.
    """
    way = way or Transfer()
    step_size = layout.tower_batch * layout.all_towers
    first = start + layout.first_tower * layout.tower_batch
    steps = tf.data.Dataset.range(first, np.iinfo(np.int64).max - step_size, step_size)
    on_host = dataclasses.replace(workload, distort=None, prepare=None) if way.distorts_there else workload
    if examples.elements:
        source = _elements_in_their_order(on_host, examples, seed, steps, layout)
    else:
        source = _examples_by_index(on_host, examples, seed, steps, layout, way.stages or way.distorts_there)
    staged = None
    if way.stages:
        staged = staging.stage(source, way.devices, start, step_size, way.end)
    batches, initializer = (staged.batches, staged.fill) if staged else (source.take(), source.iterator.initializer)
    state = None
    if examples.elements:
        names = iterator_state.names(layout.worker_batch, not way.distorts_there, layout.num_workers)
        state = iterator_state.of(source, names, layout.worker, staged)
    firsts = _firsts(first, layout.tower_batch, layout.num_towers)
    if way.distorts_there:
        batches = list(batches)  # those of the stage stay as they are
        for i, (features, labels) in enumerate(batches):
            with way.there(i, features) as features:
                draws = _draws(examples, firsts[i], layout.tower_batch, seed, on_device=True)
                batches[i] = _with_batch_size((preprocess(workload, features, draws), labels), layout.tower_batch)
    renewal = staged.renewal if staged else ()
    notes = tuple(filter(None, (way.note, shards.note(examples, layout.num_workers))))
    return Stream(batches, initializer, firsts, state, renewal, notes, source.order)


def _draws(examples: Examples, first: tf.Tensor, batch: int, seed: int, on_device: bool = False) -> PositionDraws:
    return PositionDraws(first, batch, examples.num_examples, seed, not examples.elements, on_device)


def _examples_by_index(
    workload: Workload, examples: Examples, seed: int, steps: tf.data.Dataset, layout: Layout, by_tower: bool
) -> staging.Source:
    """Fetches examples by index from the positions in `steps`: whole steps, or towers' batches several at a time."""
    fetch = examples.open()
    parts = layout.num_towers if by_tower else 1
    size = layout.worker_batch // parts

    def part(first: tf.Tensor):
        draws = _draws(examples, first, size, seed)
        features, labels = fetch(draws.indices)
        return _with_batch_size((preprocess(workload, features, draws), labels), size)

    def step(first: tf.Tensor):
        return tuple(part(first + i * size) for i in range(parts))

    iterator = _iterator(steps, step, examples, parts)
    return staging.Source(iterator, list if parts == layout.num_towers else lambda whole: _divided(whole[0], layout))


def _elements_in_their_order(
    workload: Workload, examples: Examples, seed: int, steps: tf.data.Dataset, layout: Layout
) -> staging.Source:
    """Takes the elements of a data set's own dataset, a whole step at a time; otherwise as `_examples_by_index`.

    Towers divide what has left the iterator, so that its state does not depend on their number.
    """
    step_size = layout.worker_batch
    batches, length, order = shards.batches(examples, step_size, layout.num_workers, layout.worker)

    def step(first: tf.Tensor, batch: tuple[Tensors, Tensors]):
        features, labels = batch
        draws = _draws(examples, first, step_size, seed)
        return _with_batch_size((preprocess(workload, features, draws), labels), step_size)

    iterator = _iterator(tf.data.Dataset.zip(steps, batches), step, examples)
    return staging.Source(iterator, lambda whole: _divided(whole, layout), length, order)


def _divided(whole: tuple[Tensors, Tensors], layout: Layout) -> staging.Batches:
    """Divides what has left the iterator among the towers."""
    size = layout.tower_batch
    return [tf.nest.map_structure(lambda t, i=i: t[i * size : (i + 1) * size], whole) for i in range(layout.num_towers)]


def evaluation_stream(
    workload: Workload, examples: Examples, tower_batch: int, num_towers: int, way: Transfer | None = None
) -> tuple[Stream, list[tf.Tensor]]:
    """Makes a stream of every example once, in order of its index.

    Every tower always gets tower_batch examples, since not every convolution accepts none: the end is filled up with
    the last example.

    Returns:
      The stream and, over towers, bool [tower_batch]: which examples count.
    """
    way, step_size = way or Transfer(), tower_batch * num_towers
    prepare = None if way.distorts_there else workload.prepare
    if examples.elements:
        batches = in_fixed_order(examples.elements()).batch(step_size).map(lambda *batch: (batch, _size(batch)))
        steps = tf.data.Dataset.zip(tf.data.Dataset.range(0, np.iinfo(np.int64).max, step_size), batches)
    else:
        steps = tf.data.Dataset.range(0, examples.num_examples, step_size)
        fetch = examples.open()

    def tower_examples(places: tf.Tensor, end, take):
        """Takes a batch from int64 [tower_batch] positions; those from `end` on do not count."""
        features, labels = take(tf.minimum(places, end - 1))
        features = prepare(features) if prepare else features
        return _with_batch_size((features, labels, places < end), tower_batch)

    def by_index(first: tf.Tensor):
        return first, tuple(tower_examples(places + first, examples.num_examples, fetch) for places in _places())

    def of_batch(first: tf.Tensor, batch_and_size: tuple[tuple[Tensors, Tensors], tf.Tensor]):
        batch, size = batch_and_size

        def take(places: tf.Tensor):
            return tf.nest.map_structure(lambda t: tf.gather(t, places), batch)

        return first, tuple(tower_examples(places, size, take) for places in _places())

    def _places():
        return [i * tower_batch + tf.range(tower_batch, dtype=tf.int64) for i in range(num_towers)]

    iterator = _iterator(steps, of_batch if examples.elements else by_index, examples, num_towers)
    first, towers = iterator.get_next()
    batches, firsts = [tower[:2] for tower in towers], _firsts(first, tower_batch, num_towers)
    for i, (features, labels) in enumerate(batches if way.distorts_there else ()):
        with way.there(i, features) as features:
            batches[i] = _with_batch_size((workload.prepare(features), labels), tower_batch)
    return Stream(batches, iterator.initializer, firsts), [counted for *_, counted in towers]


def _firsts(first: tf.Tensor, tower_batch: int, num_towers: int) -> list[tf.Tensor]:
    return [first + i * tower_batch for i in range(num_towers)]


def _size(batch: tuple[Tensors, Tensors]) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _iterator(steps: tf.data.Dataset, step: Callable, examples: Examples, branches: int = 1):
    """Makes an iterator over step(element of steps), which computes `branches` parts of a step at the same time."""
    # Batches computed ahead take memory and, of elements, are part of every checkpoint.
    ahead = 2 if examples.elements else min(max(2, math.ceil(host.cores() / branches)), _MOST_PARALLEL_STEPS)
    parallel_steps = examples.parallel_steps or ahead
    step = tf.autograph.experimental.do_not_convert(step)  # workloads use TensorFlow's own conditionals, if any
    dataset = steps.map(step, num_parallel_calls=parallel_steps, deterministic=True).prefetch(_PREFETCHED_STEPS)
    if not examples.elements:  # Nothing of it is tuned, and a closing session may wait a minute for the tuner's thread.
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return tf.compat.v1.data.make_initializable_iterator(dataset)


def _with_batch_size(tensors: Tensors, batch: int) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t, [batch, *t.shape[1:]]), tensors)
