"""N towers are one: at one global batch the number of towers changes nothing but the order of summation.

The network and the input are those of the reference workload, augmentations included; the images are random.
"""

import contextlib
import dataclasses
import functools

import numpy as np
import plain_convnet
import pytest
import tensorflow as tf
from trainings import on_host

import cifar10
from cifar10 import convolution
from tower_train.graph import stream
from tower_train.workload import DataRequest

v1 = tf.compat.v1

GLOBAL_BATCH = 8
STEPS = 6
# Training is not smooth: where rounding tips a ReLU's input to the other side of 0, the gradient jumps. In float32 that
# happens every few steps, and so the runs that are compared there go slowly.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
LEARNING_RATE = {"float64": 0.01, "float32": 0.001}
DIRECT = convolution.Algorithm(by_spectra=False)
MOMENTUM = 0.9
RUNS = [  # each compared with one tower
    ("float64", 8, None),
    ("float64", 2, DIRECT),
    ("float32", 2, None),
]
DECAY_FACTOR, EPOCHS_PER_DECAY = 0.5, 0.08  # of 200 examples: after steps 2 and 4


@dataclasses.dataclass(frozen=True)
class Run:
    """losses: [STEPS]; initial, final: {variable name: value}."""

    initial: dict[str, np.ndarray]
    losses: np.ndarray
    final: dict[str, np.ndarray]


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


@pytest.fixture(scope="module")
def trained(examples, open_training):
    """(dtype, towers, the convolutions' algorithm or None for the usual one) -> Run."""

    @functools.cache
    def train(dtype, num_towers, algorithm=None):
        with convolved(algorithm), open_training(
            cifar10.WORKLOAD, examples, dtype=dtype, num_gpus=num_towers, batch_size=GLOBAL_BATCH // num_towers,
            optimizer="momentum", momentum=MOMENTUM, learning_rate=LEARNING_RATE[dtype],
            learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY,
        ) as (built, session):  # fmt: skip
            variables = {variable.op.name: variable for variable in built.saved.variables}
            initial = session.run(variables)
            losses = [session.run(built.report).loss for _ in range(STEPS)]
            return Run(initial, np.array(losses), session.run(variables))

    return train


def assert_agree(found, expected, tolerance):
    """Each array is within `tolerance` of the expected one, relative to that one's greatest magnitude."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * np.max(np.abs(value)), err_msg=name)


@pytest.mark.parametrize(("dtype", "num_towers", "algorithm"), RUNS)
def test_towers_match_one_tower(trained, dtype, num_towers, algorithm):
    """The loss of every step; in the end weights, momentum, moving averages, global_step and examples_seen."""
    one, several = trained(dtype, 1), trained(dtype, num_towers, algorithm)
    np.testing.assert_allclose(several.losses, one.losses, rtol=TOLERANCE[dtype])
    assert_agree(several.final, one.final, TOLERANCE[dtype])


def test_training_moved_every_variable(trained):
    """The agreement above is not that of runs that stood still."""
    run = trained("float64", 1)
    assert len(run.final) == 3 * 10 + 2  # ten weights and biases, each with its momentum and its moving average
    for name, value in run.final.items():
        assert not np.array_equal(value, run.initial[name]), name
    assert run.final["global_step"] == STEPS
    assert run.final["examples_seen"] == STEPS * GLOBAL_BATCH


@pytest.fixture(scope="module")
def plain(trained, examples):
    """The same training on one device by plain TensorFlow operations, from the same initial weights and batches."""
    initial = trained("float64", 1).initial
    weights = {name: value for name, value in initial.items() if name.endswith(("weights", "biases"))}
    return train_plainly(weights, read_batches(examples))


@pytest.mark.parametrize("num_towers", [1, 8])
def test_towers_match_a_plain_single_device_training(trained, plain, num_towers):
    run = trained("float64", num_towers)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-9)
    assert_agree({name: run.final[name] for name in plain.final}, plain.final, 1e-9)
    assert run.final.keys() - plain.final.keys() == {"global_step", "examples_seen"}


def read_batches(examples):
    """The stream's first STEPS global batches: float32 [8, 24, 24, 3] images and int32 [8] labels."""
    with tf.Graph().as_default(), v1.Session() as session:
        source = stream.training_stream(
            cifar10.WORKLOAD, examples, 0, tf.constant(0, tf.int64), on_host(GLOBAL_BATCH, 1)
        )
        session.run(source.initializer)
        return [session.run(source.batches[0]) for _ in range(STEPS)]


def train_plainly(initial, batches):
    """Momentum and moving averages written out as assignments; batches: as of read_batches."""
    with tf.Graph().as_default(), v1.Session() as session:
        images, labels = v1.placeholder(tf.float64, batches[0][0].shape), v1.placeholder(tf.int32, [GLOBAL_BATCH])
        rate, share = v1.placeholder(tf.float64, []), v1.placeholder(tf.float64, [])
        weights = {name: tf.Variable(value) for name, value in initial.items()}
        accumulators = {name: tf.Variable(np.zeros_like(value)) for name, value in initial.items()}
        averages = {name: tf.Variable(value) for name, value in initial.items()}

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
            feed |= {rate: LEARNING_RATE["float64"] * DECAY_FACTOR**decays, share: moved}
            losses.append(session.run([loss, average], feed)[0])
        found = {"": weights, "/Momentum": accumulators, "/ExponentialMovingAverage": averages}
        final = session.run({name + kind: v for kind, variables in found.items() for name, v in variables.items()})
        return Run(initial, np.array(losses), final)
