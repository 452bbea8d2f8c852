"""The example that is trained on depends on the seed and the position, and on nothing else."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf
import trainings

import cifar10
from tower_train.graph.draws import Draws
from tower_train.graph.order import AllExamples
from tower_train.workload import DataRequest, Examples, Workload

v1 = tf.compat.v1


def shuffled(num_examples, seed):
    return AllExamples(Examples.from_arrays("numbered", np.arange(num_examples), np.arange(num_examples)), seed)


def indices(positions, num_examples, seed=0):
    with tf.Graph().as_default(), v1.Session() as session:
        _, found = shuffled(num_examples, seed).locate(tf.constant(positions, tf.int64))
        assert found.dtype == tf.int64
        return session.run(found)


def steps(workload, examples, num_steps, tower_batch, num_towers, start=0):
    """The global batches, towers joined: (features, labels) of all steps one after the other."""
    layout = trainings.on_host(tower_batch, num_towers)
    found = trainings.stream_batches(workload, examples, num_steps, layout, 0, start)
    return tuple(np.concatenate(part) for part in zip(*(batch for step in found for batch in step), strict=True))


def chi_square(counts):
    """Against equal frequencies; 158 is exceeded with probability 1.6e-4 by 99 degrees of freedom. With fixed seeds a
    test either always passes or never: it would be a false alarm for 1 of 6,200 other generators."""
    expected = np.sum(counts) / len(counts)
    return np.sum((counts - expected) ** 2 / expected)


class TestOrder:
    @pytest.mark.parametrize("num_examples", [1, 3, 257, 50_000])
    def test_every_epoch_holds_every_example_once(self, num_examples):
        for epoch in (0, 1000, 2**40):
            found = indices(np.arange(-1, num_examples + 1) + (epoch + 1) * num_examples, num_examples, seed=7)[1:-1]
            np.testing.assert_array_equal(np.sort(found), np.arange(num_examples))

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        """Also those that agree in their low bits, which are all that the cipher looks at in its seeds."""
        positions = np.arange(5000)[:, np.newaxis] * 100 + np.arange(6)  # the first six places of each epoch
        orders = [tuple(order) for order in indices(positions.ravel(), 100).reshape(positions.shape)]
        orders += [tuple(indices(np.arange(6), 100, seed)) for seed in (1, 256, 2**32, 2**40, 2**63 - 1)]
        assert len(set(orders)) == len(orders)
        assert tuple(range(6)) not in orders

    def test_neighbours_in_the_stream_lie_anywhere_in_the_data(self):
        """The distance from one to the next is equally often in every hundredth of the data set."""
        distances = np.diff(indices(np.arange(50_000), 50_000)) % 50_000
        assert chi_square(np.histogram(distances, bins=100, range=(0, 50_000))[0]) < 158


def split_mix_64(key, counters):
    """SplitMix64 (Steele, Lea and Flood 2014), of whose numbers the highest 24 bits are taken."""
    bits = np.uint64(key) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    return ((bits ^ bits >> np.uint64(31)) >> np.uint64(40)).astype(np.float32) / 2**24


class TestDrawsOfExamples:
    @pytest.mark.parametrize(("name", "count", "seed"), [("flip", 1, 0), ("crop", 3, 2**40)])
    def test_they_are_those_of_the_example_in_every_epoch(self, name, count, seed):
        with tf.Graph().as_default(), v1.Session() as session:
            here = Draws(seed, tf.constant(730, tf.int64), 270, locate=shuffled(100, seed).locate)
            found, of = session.run([here.per_example(name, count), here.indices])
        key = int.from_bytes(hashlib.sha256(f"{seed} example {name}".encode()).digest()[:8], "little")
        np.testing.assert_array_equal(found, split_mix_64(key, of[:, np.newaxis] * count + np.arange(count)))
        np.testing.assert_array_equal(of, indices(np.arange(730, 1000), 100, seed))


class TestTrainingStream:
    @pytest.fixture(scope="class")
    def examples(self, cifar10_dir):
        return cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))

    def test_one_times_64_is_two_times_32_is_eight_times_8_is_the_rest_of_what_began_before(self, examples):
        """Over the end of an epoch of 200."""
        images, labels = steps(cifar10.WORKLOAD, examples, 4, 64, 1)
        assert images.shape == (256, 24, 24, 3) and labels.shape == (256,)
        for tower_batch, num_towers, start in [(32, 2, 0), (8, 8, 0), (8, 4, 128)]:
            found_images, found_labels = steps(cifar10.WORKLOAD, examples, 4, tower_batch, num_towers, start=start)
            np.testing.assert_array_equal(found_labels, labels[start:])
            np.testing.assert_array_equal(found_images, images[start:])

    def test_an_example_is_augmented_otherwise_in_the_next_epoch(self):
        numbers = np.arange(10, dtype=np.float32)
        workload = Workload("toy", None, None, augment=lambda x, draws: x + draws.uniform("shift", 1)[:, 0] / 2)
        features, labels = steps(workload, Examples.from_arrays("numbers", numbers, numbers), 2, 10, 1)
        np.testing.assert_array_equal(np.floor(features), labels)
        first, second = (features[epoch][np.argsort(labels[epoch])] for epoch in (slice(10), slice(10, 20)))
        assert (first != second).all()

    def test_without_augmentation_examples_are_prepared_as_for_evaluation(self):
        numbers = np.arange(10, dtype=np.float32)
        workload = Workload("toy", None, None, prepare=lambda features: -features)
        features, labels = steps(workload, Examples.from_arrays("numbers", numbers, numbers), 1, 10, 1)
        np.testing.assert_array_equal(features, -labels)
        np.testing.assert_array_equal(labels, indices(np.arange(10), 10))
