"""An endless, seeded stream of positions, each of one example.

Position p belongs to epoch p // n and to example permutation(seed, epoch)[p % n] (order.py, draws.py). There is no
shuffle buffer, and nothing depends on the number of towers, so the number of examples seen is a run's position. Batches
that were fetched ahead and not trained on are read again.

The way of a batch: `_Reader.read` fetches and preprocesses it in a tf.data pipeline, `_Reader.take` divides it among
the towers, transfer.py brings it to their devices. Data in an order of their own keep that order (elements.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as framework

from tower_train import errors, host, user_functions
from tower_train.examples import Examples, Tensors
from tower_train.graph import elements, xla
from tower_train.graph.devices import HOST
from tower_train.graph.draws import Draws
from tower_train.graph.gradients import is_finite
from tower_train.graph.layout import Layout, Tower
from tower_train.graph.order import AllExamples
from tower_train.graph.transfer import TO_HOST, Batches, Transfer, stage_batches
from tower_train.workload import Workload

_PREFETCHED_STEPS = 2
_MOST_PARALLEL_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches for all towers."""

    batches: Batches  # over towers, (features, labels); each session.run consumes one step of all of them
    initializer: tf.Operation  # puts the stream at its start; run it after variables hold their values
    positions: list[tf.Tensor]  # over towers, int64 scalar, that of its first example
    order: AllExamples  # which example each position has; HardExamples with --keep_hardest
    state: elements.IteratorState | None = None  # None if the number of examples seen determines it
    # ops that fetch the next step's batches, which a step runs before it counts; none if taking one's own advances the
    # stream
    renewal: Sequence[tf.Operation] = ()
    notes: tuple[str, ...] = ()  # for the log

    @property
    def arrivals(self) -> list:
        """Ops or tensors that are done once the input that a step fetches has come."""
        return list(self.renewal) or tf.nest.flatten(self.batches)

    def renewed(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the same tensor, once the next step's batches are in their place."""
        if not self.renewal:
            return tensor
        with tf.device(HOST), tf.control_dependencies(self.renewal):
            return tf.identity(tensor)

    def waited(self, computed: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        """Returns the seconds in which a step waits for input: from its beginning or, for staged batches, from when
        `computed`, one of its last tensors, is ready."""
        if framework.is_op_determinism_enabled():  # refuses tf.timestamp
            return tf.zeros([], tf.float64)
        with tf.device(HOST), tf.compat.v1.name_scope("input_wait"):
            # A copy on the host waits until the device has computed it; a control dependency would not.
            computed_here = [tf.identity(is_finite(computed))] if self.renewal else []
            with tf.control_dependencies(computed_here):
                began = tf.timestamp()
            with tf.control_dependencies([tf.group(*self.arrivals)]):
                arrived = tf.timestamp()
            return tf.maximum(arrived - began, 0.0)


def training_stream(
    workload: Workload,
    examples: Examples,
    seed: int,
    examples_seen: tf.Tensor,
    layout: Layout,
    transfer: Transfer = TO_HOST,
    order: AllExamples | None = None,
) -> Stream:
    """Makes the stream of training batches. Each step begins at position `examples_seen` (int64 scalar); the tower at
    place i of it gets the positions from there + i * tower_batch on.

    Args:
      workload, examples, seed, layout: of the training.
      examples_seen: as above.
      transfer: of the batches to their towers.
      order: of examples by index; None for passes over all.
    """
    if workload.mix and layout.tower_batch % 2:
        raise errors.ConfigError(
            f"workload {workload.name} mixes examples in pairs, and {layout.tower_batch} per tower is odd. Choose a "
            "--batch_size, or a --global_batch_size, that gives each tower an even number."
        )
    order = order or AllExamples(examples, seed)
    offsets = [place * layout.tower_batch for place in layout.places(layout.worker, in_turns=not examples.elements)]
    # known without the batches, so that layers can draw before these come
    positions = [examples_seen + offset for offset in offsets]
    # from the value of examples_seen when the initializer runs; endless, as only the run knows its last step
    steps = tf.data.Dataset.range(examples_seen, np.iinfo(np.int64).max - layout.global_batch, layout.global_batch)
    make_draws = functools.partial(Draws, seed, locate=order.locate)
    reader = _Reader(workload, examples, layout, transfer, make_draws, offsets)
    if examples.elements:
        dataset, length = elements.batches(examples, reader.part_size, layout.num_workers, layout.worker)
        steps = tf.data.Dataset.zip(steps, dataset)
    iterator = iterator_over(steps, reader.read, examples, branches=reader.parts)
    take = functools.partial(reader.take, iterator)
    if transfer.is_staged:
        begin = iterator.initializer
        staged = stage_batches(take, reader.on_devices, begin, layout, examples_seen, transfer.end)
        batches, initializer, renewal = staged
    else:
        batches, initializer, renewal = reader.on_devices(take(), examples_seen), iterator.initializer, ()
    return Stream(
        batches,
        initializer,
        positions,
        order,
        state=elements.iterator_state(iterator, layout, not transfer.augments_on_devices, length)
        if examples.elements
        else None,
        renewal=renewal,
        notes=(transfer.note,) if transfer.note else (),
    )


class _Reader:
    """Reads a step's batches on the host, and preprocesses them there or on their towers' devices."""

    def __init__(
        self,
        workload: Workload,
        examples: Examples,
        layout: Layout,
        transfer: Transfer,
        make_draws: Callable[..., Draws],  # (position, number of examples) -> their random numbers
        offsets: Sequence[int],  # over towers, of their positions in a step
    ):
        self._workload, self._layout, self._transfer = workload, layout, transfer
        self._make_draws, self._offsets = make_draws, offsets
        # An element of the iterator is a whole step, which `take` slices, or one batch a tower, read in parallel.
        # Data in an order of their own come as whole steps: the iterator's state must not depend on the towers.
        is_whole = offsets[-1] - offsets[0] == layout.worker_batch - layout.tower_batch  # one range of positions
        by_tower = (transfer.is_staged or transfer.augments_on_devices or not is_whole) and not examples.elements
        self.parts = layout.num_towers if by_tower else 1
        self.part_size = layout.worker_batch // self.parts
        # here, outside of tf.data's function, as it may hold the data as constants
        self._fetch = examples.opened() if examples.open else None

    def read(self, position: tf.Tensor, batch: tuple[Tensors, Tensors] | None = None) -> tuple:
        """Returns the parts of the step from a position on, each (features, labels). batch: a data set's next ones, if
        it has an order of its own."""
        return tuple(self._part(position + offset, batch) for offset in self._offsets[: self.parts])

    def _part(self, position: tf.Tensor, batch: tuple[Tensors, Tensors] | None) -> tuple[Tensors, Tensors]:
        # no device: placements slow an input function down
        draws = self._make_draws(position, self.part_size, device=None)
        # draws.indices: the examples at these positions, in the order that `order` gives
        batch = self._fetch(draws.indices) if batch is None else batch
        if not self._transfer.augments_on_devices:
            batch = _preprocess(self._workload, *batch, draws)
        return with_batch_size(batch, self.part_size)

    def take(self, iterator) -> Batches:
        """Takes a step out of the iterator over what `read` returns; over towers."""
        # once a step; each further call would take another step
        batches, size = iterator.get_next(), self._layout.tower_batch
        if self.parts == self._layout.num_towers:
            return list(batches)
        towers = range(self._layout.num_towers)
        return [tf.nest.map_structure(lambda t, i=i: t[i * size : (i + 1) * size], batches[0]) for i in towers]

    def on_devices(self, batches: Batches, seen: tf.Tensor) -> Batches:
        """Returns the batches of the step from position `seen` on as the towers take them."""
        if not self._transfer.augments_on_devices:
            return batches
        return [
            self._on_device(tower, batch, seen + offset)
            for tower, batch, offset in zip(self._layout.towers, batches, self._offsets, strict=True)
        ]

    def _on_device(self, tower: Tower, batch: tuple[Tensors, Tensors], position: tf.Tensor) -> tuple[Tensors, Tensors]:
        with (
            tf.device(tower.device),
            xla.compiled(self._transfer.is_compiled, tower.device, "input"),
            tf.compat.v1.name_scope(f"tower_{tower.index}/preprocess/"),
        ):
            # before augmentation, as images cross as uint8, and it makes four times as many bytes of them
            here = tf.nest.map_structure(tf.identity, batch[0])
            draws = self._make_draws(position, self._layout.tower_batch)
            batch = _preprocess(self._workload, here, batch[1], draws)
        return with_batch_size(batch, self._layout.tower_batch)


def _preprocess(workload: Workload, features: Tensors, labels: Tensors, draws: Draws) -> tuple[Tensors, Tensors]:
    """Returns features as the network takes them in training, and their labels."""
    if workload.augment:
        features = user_functions.call(workload, "augment", features, draws)
    else:
        features = prepared(workload, features)
    return workload.mix(features, labels, draws) if workload.mix else (features, labels)


def prepared(workload: Workload, features: Tensors) -> Tensors:
    """Returns features as the network takes them in evaluation."""
    return user_functions.call(workload, "prepare", features) if workload.prepare else features


def iterator_over(steps: tf.data.Dataset, step: Callable, examples: Examples, branches: int = 1):
    """Makes an iterator over step(element of steps), which computes `branches` parts of a step at the same time."""
    # Batches computed ahead take memory and, of elements, are part of every checkpoint.
    ahead = 2 if examples.elements else min(max(2, math.ceil(host.cores() / branches)), _MOST_PARALLEL_STEPS)
    parallel_steps = examples.parallel_steps or ahead
    step = tf.autograph.experimental.do_not_convert(step)  # workloads use TensorFlow's own conditionals, if any
    # deterministic: the order of examples is a promise, also at the price of waiting for one
    dataset = steps.map(step, num_parallel_calls=parallel_steps, deterministic=True).prefetch(_PREFETCHED_STEPS)
    if not examples.elements:
        options = tf.data.Options()
        # they find nothing here, and take half of the time in which the stream begins again
        options.experimental_optimization.apply_default_optimizations = False
        dataset = not_tuned(dataset.with_options(options))
    return tf.compat.v1.data.make_initializable_iterator(dataset)


def not_tuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set without tf.data's tuner, for whose thread a closing iterator may wait a minute."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def with_batch_size(tensors: Tensors, batch: int) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t, [batch, *t.shape[1:]]), tensors)
