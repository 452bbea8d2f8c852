"""An endless, seeded stream of positions, each of one example.

Position p belongs to epoch p // n and to example permutation(seed, epoch)[p % n], unless examples are left out (see
hard_examples.py). Nothing is buffered and nothing depends on the number of towers, so the number of examples seen is a
run's position.

A data set with an order of its own keeps that order; then only its iterator knows the position, and its state goes into
the checkpoint.
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
from tower_train.graph.draws import Draws, located
from tower_train.graph.gradients import is_finite
from tower_train.graph.layout import Layout, Tower
from tower_train.graph.transfer import TO_HOST, Batches, Transfer, stage_batches
from tower_train.workload import Workload

_PREFETCHED_STEPS = 2
_MOST_PARALLEL_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches for all towers."""

    batches: Batches  # a list over towers of (features, labels); each session.run consumes one step of all of them
    initializer: tf.Operation  # op that puts the stream at its start; run it after variables hold their values
    positions: list[tf.Tensor]  # over towers, int64 scalar, that of its first example
    # to save and restore, if the number of examples seen does not determine it; else None
    state: elements.IteratorState | None = None
    # ops that each step must run before it counts, which fetch the next step's batches; none if fetching a batch
    # advances the stream
    renewal: Sequence[tf.Operation] = ()
    notes: tuple[str, ...] = ()  # lines on the place of preprocessing and on workers' shares of the examples

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

    def waited(self, computed: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        """Returns the seconds in which a step waits for input: from its beginning on or, for the next step's batches,
        after the step has `computed` a tensor, one of its last. 0 under op determinism, which knows no time."""
        if framework.is_op_determinism_enabled():
            return tf.zeros([], tf.float64)
        with tf.device(HOST), tf.compat.v1.name_scope("input_wait"):
            # A copy on the host waits for the device; a control dependency would not.
            began = [tf.identity(is_finite(computed))] if self.renewal else []
            with tf.control_dependencies(began):
                began = tf.timestamp()
            with tf.control_dependencies([tf.group(*self.arrivals)]):
                arrived = tf.timestamp()
            return tf.maximum(arrived - began, 0.0)


def training_stream(
    workload: Workload, examples: Examples, seed: int, examples_seen: tf.Tensor, layout: Layout,
    transfer: Transfer = TO_HOST, locate: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None = None,
    is_compiled: bool = False,
) -> Stream:  # fmt: skip
    """Makes the stream of training batches, which begin at position `examples_seen` (int64 scalar) of each step.

    Tower i of a step that begins at position p gets the positions from p + i * tower_batch on, counted over the towers
    of all workers, worker 0's first. Examples in their own order take those positions in that order, except those of
    files, of which each worker has its own order. `locate` names the (epochs, examples) of positions; None for passes
    over all examples. is_compiled: whether what is computed on the towers' devices is for XLA.
    """
    if workload.mix and layout.tower_batch % 2:
        raise errors.ConfigError(
            f"workload {workload.name} mixes examples in pairs, and {layout.tower_batch} per tower is odd. Choose a "
            "--batch_size, or a --global_batch_size, that gives each tower an even number."
        )
    first, size = examples_seen + layout.first_tower * layout.tower_batch, layout.tower_batch
    positions = [first + i * size for i in range(layout.num_towers)]
    steps = tf.data.Dataset.range(first, np.iinfo(np.int64).max - layout.global_batch, layout.global_batch)
    # Towers divide the elements of a data set once these have left the iterator, so that its state does not depend on
    # their number; examples by index come as whole steps, or as towers' batches several at a time.
    by_tower = (transfer.is_staged or transfer.augments_there) and not examples.elements
    parts = layout.num_towers if by_tower else 1
    part_size = layout.worker_batch // parts
    if examples.elements:
        dataset, length = elements.batches(examples, part_size, layout.num_workers, layout.worker)
        steps = tf.data.Dataset.zip(steps, dataset)
    fetch = examples.opened() if examples.open else None

    of_all = functools.partial(located, num_examples=examples.num_examples, seed=None if examples.elements else seed)
    draws = functools.partial(Draws, seed, locate=locate or of_all)

    def part(position: tf.Tensor, batch: tuple[Tensors, Tensors] | None = None) -> tuple[Tensors, Tensors]:
        numbers = draws(position, part_size, device=None)
        features, labels = fetch(numbers.indices) if batch is None else batch
        if not transfer.augments_there:
            features, labels = _preprocess(workload, features, labels, numbers)
        return with_batch_size((features, labels), part_size)

    def take() -> Batches:
        batches = iterator.get_next()
        return list(batches) if parts == layout.num_towers else _divided(batches[0], layout)

    def step(position: tf.Tensor, *batch) -> tuple[tuple[Tensors, Tensors], ...]:
        return tuple(part(position + i * part_size, *batch) for i in range(parts))

    iterator = iterator_over(steps, step, examples, branches=parts)

    def on_devices(batches: Batches, seen: tf.Tensor) -> Batches:
        """Returns the batches of the step from position `seen` on as the towers take them."""
        return [
            on_device(tower, batch, seen + (layout.first_tower + i) * size)
            for i, (tower, batch) in enumerate(zip(layout.towers, batches, strict=True))
        ]

    def on_device(tower: Tower, batch: tuple[Tensors, Tensors], position: tf.Tensor) -> tuple[Tensors, Tensors]:
        if not transfer.augments_there:
            return batch
        with (
            tf.device(tower.device),
            xla.compiled(is_compiled, tower.device, "input"),
            tf.compat.v1.name_scope(f"tower_{tower.index}/preprocess/"),
        ):
            here = tf.nest.map_structure(tf.identity, batch[0])
            batch = _preprocess(workload, here, batch[1], draws(position, size))
        return with_batch_size(batch, size)

    if transfer.is_staged:
        begin = iterator.initializer
        batches, initializer, renewal = stage_batches(take, on_devices, begin, layout, examples_seen, transfer.end)
    else:
        batches, initializer, renewal = on_devices(take(), examples_seen), iterator.initializer, ()
    state = elements.state_of(iterator, layout, not transfer.augments_there, length) if examples.elements else None
    notes = tuple(filter(None, (transfer.note, elements.workers_line(examples, layout.num_workers))))
    return Stream(batches, initializer, positions, state, renewal, notes)


def _preprocess(workload: Workload, features: Tensors, labels: Tensors, draws: Draws) -> tuple[Tensors, Tensors]:
    """Returns features of training examples as the network takes them, and the labels that go with them."""
    if workload.augment:
        features = user_functions.call(workload, "augment", features, draws)
    else:
        features = prepared(workload, features)
    return user_functions.call(workload, "mix", features, labels, draws) if workload.mix else (features, labels)


def prepared(workload: Workload, features: Tensors) -> Tensors:
    """Returns features as the network takes them in evaluation."""
    return user_functions.call(workload, "prepare", features) if workload.prepare else features


def _divided(whole: tuple[Tensors, Tensors], layout: Layout) -> Batches:
    size = layout.tower_batch
    return [tf.nest.map_structure(lambda t, i=i: t[i * size : (i + 1) * size], whole) for i in range(layout.num_towers)]


def iterator_over(steps: tf.data.Dataset, step: Callable, examples: Examples, branches: int = 1):
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


def with_batch_size(tensors: Tensors, batch: int) -> Tensors:
    return tf.nest.map_structure(lambda t: tf.ensure_shape(t, [batch, *t.shape[1:]]), tensors)
