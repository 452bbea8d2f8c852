"""N towers on the reference workload, augmentations included, train what a program for one device trains.

That program has no towers, and none of the trainer's mathematics; its images are random. And mirrored variables train
what variables on the CPU train, also where one tower would not have the same numbers.
"""

import contextlib

import norm_workload
import numpy as np
import plain_convnet
import pytest
import tensorflow as tf
import trainings

import cifar10
from cifar10 import convolution
from tower_train.graph import stream
from tower_train.workload import DataRequest

v1 = tf.compat.v1

GLOBAL_BATCH, STEPS = 8, 6
# Training is not smooth: where rounding tips a ReLU's input to the other side of 0, the gradient jumps. In float32 that
# happens every few steps, and so the runs that are compared there go slowly.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
LEARNING_RATE = {"float64": 0.01, "float32": 0.001}
DIRECT = convolution.Algorithm(by_spectra=False)
MOMENTUM = 0.9
DECAY_FACTOR, EPOCHS_PER_DECAY = 0.5, 0.08  # of 200 examples: after steps 2 and 4


@pytest.fixture(scope="module")
def examples(cifar10_dir):
    return cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))


@contextlib.contextmanager
def convolved(algorithm):
    """Has all convolutions use this algorithm within the block; None for the usual ones."""
    with pytest.MonkeyPatch.context() as patch:
        if algorithm:
            patch.setattr(convolution, "fastest", lambda dtype, channels: algorithm)
        yield


def train(examples, dtype, num_towers, algorithm):
    """(variables before, losses, variables after) of the trainer, the variables by name."""
    with convolved(algorithm), trainings.opened(
        cifar10.WORKLOAD, examples, dtype=dtype, num_gpus=num_towers, batch_size=GLOBAL_BATCH // num_towers,
        optimizer="momentum", momentum=MOMENTUM, learning_rate=LEARNING_RATE[dtype],
        learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY,
    ) as (built, session):  # fmt: skip
        variables = {variable.op.name: variable for variable in built.saved.variables}
        initial = session.run(variables)
        return initial, [session.run(built.report).loss for _ in range(STEPS)], session.run(variables)


@pytest.fixture(scope="module")
def plain(examples):
    """(dtype, initial weights) -> losses and final variables, of the first such weights: all towers begin with them."""
    batches, done = read_batches(examples), {}

    def train(dtype, weights):
        if dtype not in done:
            done[dtype] = train_plainly(weights, batches, LEARNING_RATE[dtype])
        return done[dtype]

    return train


@pytest.mark.parametrize(
    ("dtype", "num_towers", "algorithm"),
    [("float64", 1, None), ("float64", 8, None), ("float64", 2, DIRECT), ("float32", 2, None)],
)
def test_towers_match_a_plain_single_device_training(examples, plain, dtype, num_towers, algorithm):
    """The loss of every step; in the end weights, momentum, moving averages and counters."""
    initial, losses, final = train(examples, dtype, num_towers, algorithm)
    expected_losses, expected = plain(dtype, {n: v for n, v in initial.items() if n.endswith(("weights", "biases"))})
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[dtype])
    assert len(expected) == 3 * 10  # ten weights and biases, each with its momentum and its moving average
    assert final.keys() - expected.keys() == {"global_step", "examples_seen"}
    assert (final["global_step"], final["examples_seen"]) == (STEPS, STEPS * GLOBAL_BATCH)
    for name, value in expected.items():
        assert not np.array_equal(value, initial[name]), f"{name} stood still"
        tolerance = TOLERANCE[dtype] * np.max(np.abs(value))
        np.testing.assert_allclose(final[name], value, rtol=0, atol=tolerance, err_msg=name)


def read_batches(examples):
    """The stream's first STEPS global batches: float32 [8, 24, 24, 3] images and int32 [8] labels."""
    with tf.Graph().as_default(), v1.Session() as session:
        start, layout = tf.constant(0, tf.int64), trainings.on_host(GLOBAL_BATCH)
        source = stream.training_stream(cifar10.WORKLOAD, examples, 0, start, layout)
        session.run(source.initializer)
        return [session.run(source.batches[0]) for _ in range(STEPS)]


def train_plainly(initial, batches, learning_rate):
    """Momentum and moving averages written out as assignments; batches: as of read_batches. In float64."""
    with tf.Graph().as_default(), v1.Session() as session:
        images, labels = v1.placeholder(tf.float64, batches[0][0].shape), v1.placeholder(tf.int32, [GLOBAL_BATCH])
        rate, share = v1.placeholder(tf.float64, []), v1.placeholder(tf.float64, [])
        weights = {name: tf.Variable(np.float64(value)) for name, value in initial.items()}
        accumulators = {name: tf.Variable(np.zeros(value.shape)) for name, value in initial.items()}
        averages = {name: tf.Variable(np.float64(value)) for name, value in initial.items()}

        logits = plain_convnet.activations(images, weights)["softmax_linear"]
        right = tf.one_hot(labels, 10, dtype=tf.float64)
        cross_entropy = -tf.reduce_mean(tf.reduce_sum(right * tf.nn.log_softmax(logits), axis=1))
        decayed = [weights["local3/weights"], weights["local4/weights"]]
        loss = cross_entropy + 0.004 / 2 * sum(tf.reduce_sum(tf.square(w)) for w in decayed)
        gradients = dict(zip(weights, tf.gradients(loss, list(weights.values())), strict=True))

        accumulate = [accumulators[name].assign(MOMENTUM * accumulators[name] + gradients[name]) for name in weights]
        with tf.control_dependencies([loss, *accumulate]):
            move = [weights[name].assign_sub(rate * accumulators[name].read_value()) for name in weights]
        with tf.control_dependencies(move):
            average = [
                averages[name].assign_sub(share * (averages[name] - weights[name].read_value())) for name in weights
            ]
        session.run(v1.global_variables_initializer())
        losses = []
        for step, batch in enumerate(batches):
            decays = step * GLOBAL_BATCH // round(EPOCHS_PER_DECAY * 200)
            moved = 1 - (1 + step) / (10 + step)  # the rule of tf.train.ExponentialMovingAverage
            feed = {images: batch[0], labels: batch[1]}
            feed |= {rate: learning_rate * DECAY_FACTOR**decays, share: moved}
            losses.append(session.run([loss, average], feed)[0])
        found = {"": weights, "/Momentum": accumulators, "/ExponentialMovingAverage": averages}
        final = {name + kind: v for kind, variables in found.items() for name, v in variables.items()}
        return losses, session.run(final)


MIRRORED_STEPS = 20
SMALL = dict(dtype="float64", learning_rate=0.05, ema=0.9, batch_size=4)
MIRRORED = {  # of a network with batch statistics, which differ in each part of a batch, and a sparse gradient
    "collective": dict(num_gpus=2, accumulate_steps=2, clip_gradients=0.1, optimizer="momentum"),
    "add_n": dict(num_gpus=3, sync_batch_norm=True, optimizer="adam", learning_rate=0.01),
}


@pytest.mark.parametrize("kind", MIRRORED)
def test_mirrored_variables_end_with_the_values_of_those_on_the_cpu(kind):
    """Losses of every step; weights, optimizer's slots, moving statistics and averages at the end."""
    mirrored, on_cpu = (
        trainings.train(
            norm_workload.WORKLOAD, norm_workload.load(None), MIRRORED_STEPS, **(SMALL | MIRRORED[kind] | mode)
        )
        for mode in (dict(variable_update="mirrored", all_reduce=kind), dict(variable_update="cpu"))
    )
    trainings.assert_same(mirrored, on_cpu)
