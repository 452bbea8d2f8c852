"""The random numbers of layers belong to examples: no cut of the batch, no restart and no other layer changes them."""

import hashlib
import math

import numpy as np
import pytest
import tensorflow as tf
import trainings

import tower_train
from tower_train import layers
from tower_train.data import tf_data
from tower_train.graph import context, devices
from tower_train.graph.draws import Draws
from tower_train.inference.evaluation_graph import evaluation_graph

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=[40, 6]).astype(np.float32), RNG.integers(0, 3, 40)


def philox(key, counter):
    """Philox4x32 with ten rounds, from Salmon et al. 2011, section 3.3: four 32-bit numbers."""
    key, words = [key % 2**32, key >> 32], [counter >> 32 * i & 0xFFFFFFFF for i in range(4)]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ key[0], second % 2**32, first >> 32 ^ words[3] ^ key[1], first % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words


def expected(text, positions, count):
    """float32 [positions, count] in [0, 1), by 23 bits of each number of Philox."""
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    each = -(-count // 4)
    rows = [[word for i in range(each) for word in philox(key, p * each + i)][:count] for p in positions]
    return (np.array(rows, np.uint32) % 2**23 / 2**23).astype(np.float32)


def numbers(build, first=0, batch=8, key="3 layer", step=0):
    """Evaluates build(Draws) at a place of the stream."""
    with tf.Graph().as_default(), v1.Session() as session:
        draws = Draws(key, tf.constant(first, tf.int64), batch, tf.constant(step, tf.int64))
        with context.Context().enter_tower(0, draws):
            return session.run(build(draws))


def examples():
    return tower_train.Examples.from_arrays("points", FEATURES, LABELS, ["a", "b", "c"])


class TestNumbers:
    @pytest.mark.parametrize("count", [1, 4, 10])
    def test_are_those_of_philox(self, count):
        found = numbers(lambda draws: [draws.for_layer("dense/dropout", [8, count]) for _ in range(2)], first=1000)
        for call, each in enumerate(found):
            np.testing.assert_array_equal(each, expected(f"3 layer dense/dropout {call}", range(1000, 1008), count))
        found = numbers(lambda draws: draws.uniform("crop", count), first=2**40, key=7)  # of an augmentation
        np.testing.assert_array_equal(found, expected("7 crop", range(2**40, 2**40 + 8), count))

    @pytest.mark.parametrize(("normal", "dtype"), [(False, tf.bfloat16), (True, tf.float64)])
    def test_of_a_part_are_a_part_of_the_whole(self, normal, dtype):
        def draw(first, batch):
            return numbers(lambda draws: draws.for_layer("name", [batch, 5], dtype, normal=normal), first, batch)

        np.testing.assert_array_equal(draw(75, 4), draw(70, 12)[5:9])

    def test_have_the_moments_of_their_distributions(self):
        uniform = numbers(lambda draws: layers.random_uniform([8, 5000], -1, 3))
        normal = numbers(lambda draws: layers.random_normal([8, 5000], 2.0, 0.5))
        limit = 5 / math.sqrt(40_000)  # five deviations: another seed fails with probability 6e-7 for each mean
        assert -1 <= uniform.min() < -0.999 and 2.999 < uniform.max() < 3
        assert abs(uniform.mean() - 1) < limit * 4 / math.sqrt(12)
        assert abs(normal.mean() - 2) < limit * 0.5 and abs(normal.std() - 0.5) < limit * 0.5

    def test_of_the_step_are_the_same_in_all_towers(self):
        for first in (96, 100):
            found = numbers(lambda draws: draws.for_layer("a", [1, 7], by_example=False), first, 4, step=96)
            np.testing.assert_array_equal(found, expected("3 layer a 0", [96], 7))


class TestDropout:
    @pytest.mark.parametrize(
        ("dtype", "shape", "noise"),
        [(tf.float64, [6], None), (tf.bfloat16, [6], None), (tf.float32, [2, 3, 6], [None, 1, 1, None])],
    )
    def test_drops_by_those_numbers_and_scales_the_rest_forward_and_backward(self, dtype, shape, noise):
        def build(draws):
            inputs = tf.ones([8, *shape], dtype)
            with v1.variable_scope("block"):
                outputs = layers.dropout(inputs, 0.3, True)
            outputs = draws.dropout("channels", inputs, 0.3, noise) if noise else outputs
            return [tf.cast(each, tf.float64) for each in (outputs, tf.gradients(outputs, inputs)[0])]

        outputs, gradient = numbers(build, first=24)
        kept = expected(f"3 layer {'channels' if noise else 'block/dropout'} 0", range(24, 32), 6) >= np.float32(0.3)
        factors = np.broadcast_to(np.reshape(kept, [8, *[1] * (len(shape) - 1), 6]), [8, *shape]) / 0.7
        tolerance = 1e-15 if dtype == tf.float64 else 1e-2
        np.testing.assert_allclose(outputs, factors, rtol=tolerance)
        np.testing.assert_allclose(gradient, factors, rtol=tolerance)

    def test_is_the_identity_in_evaluation_and_with_rate_0(self):
        inputs = tf.constant(FEATURES)
        assert layers.dropout(inputs, 0.5, training=False) is inputs
        assert layers.dropout(inputs, 0, training=True) is inputs


class TestTowers:
    def test_draw_by_the_seed_and_the_position_in_the_stream(self):
        """Of a network and a loss whose mean is of what is drawn; 40 examples an epoch."""

        def network(features, training):
            return layers.random_uniform(tf.shape(features)) + 0 * v1.get_variable("unused", [])

        def loss(outputs, labels):
            return tf.reduce_mean(outputs * layers.random_uniform(tf.shape(outputs)))

        workload = tower_train.Workload("drawn", None, network, loss)
        cut = dict(batch_size=5, num_gpus=2, accumulate_steps=2, variable_update="mirrored")
        losses, _ = trainings.train(workload, examples(), 10, seed=5, **cut)
        first, second = (expected(f"5 layer random_uniform {i}", range(200), 6) for i in range(2))
        drawn = (first * second).reshape(10, -1)
        np.testing.assert_allclose(losses, drawn.mean(axis=1, dtype=np.float64), rtol=1e-6)

    @pytest.mark.parametrize("in_order", [False, True])
    def test_evaluation_draws_by_the_examples_index(self, in_order):
        def network(features, training):
            return layers.random_uniform([features.shape[0], 3])

        def make():
            return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))

        data = tf_data.examples("points", make, num_examples=40) if in_order else examples()
        workload = tower_train.Workload("drawn", None, network, metrics=lambda out, labels: {"drawn": out[:, 2]})
        placed = devices.place(tower_train.Config(num_gpus=3, device="cpu"))
        built = evaluation_graph(workload, data, 4, "float32", 0, placed)
        with v1.Session(graph=built.graph, config=placed.session_config) as session:
            session.run(built.stream_initializer)
            found = np.concatenate([session.run(built.fetches["metrics"])["drawn"] for _ in range(built.num_steps)])
        np.testing.assert_array_equal(found, expected("evaluation random_uniform 0", range(40), 3)[:, 2])
