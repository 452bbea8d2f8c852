"""N towers on the reference workload, augmentations included, train what a program for one device trains.

That program has no towers, and none of the trainer's mathematics; its images are random.
"""

import numpy as np
import tensorflow as tf
import trainings

import cifar10
from tower_train.graph import stream
from tower_train.workload import DataRequest

v1 = tf.compat.v1

GLOBAL_BATCH, STEPS = 8, 6
RATE, MOMENTUM = 0.01, 0.9
DECAY_FACTOR, EPOCHS_PER_DECAY = 0.5, 0.08  # of 200 examples: after steps 2 and 4


def test_eight_towers_match_a_plain_single_device_training(cifar10_dir):
    """The loss of every step; in the end weights, momentum, moving averages and counters."""
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    with trainings.opened(
        cifar10.WORKLOAD, examples, dtype="float64", num_gpus=8, batch_size=GLOBAL_BATCH // 8,
        optimizer="momentum", momentum=MOMENTUM, learning_rate=RATE,
        learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY,
    ) as (built, session):  # fmt: skip
        variables = {variable.op.name: variable for variable in built.saved.variables}
        initial = session.run(variables)
        losses, final = [session.run(built.report).loss for _ in range(STEPS)], session.run(variables)
    weights = {name: value for name, value in initial.items() if name.endswith(("weights", "biases"))}
    expected_losses, expected = train_plainly(weights, read_batches(examples))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    assert len(expected) == 3 * 10  # ten weights and biases, each with its momentum and its moving average
    assert final.keys() - expected.keys() == {"global_step", "examples_seen"}
    assert (final["global_step"], final["examples_seen"]) == (STEPS, STEPS * GLOBAL_BATCH)
    for name, value in expected.items():
        assert not np.array_equal(value, initial[name]), f"{name} stood still"
        np.testing.assert_allclose(final[name], value, rtol=0, atol=1e-9 * np.max(np.abs(value)), err_msg=name)


def read_batches(examples):
    """The stream's first STEPS global batches: float32 [8, 24, 24, 3] images and int32 [8] labels."""
    with tf.Graph().as_default(), v1.Session() as session:
        start, layout = tf.constant(0, tf.int64), trainings.on_host(GLOBAL_BATCH)
        source = stream.training_stream(cifar10.WORKLOAD, examples, 0, start, layout)
        session.run(source.initializer)
        return [session.run(source.batches[0]) for _ in range(STEPS)]


def plain_network(images, variables):
    """The reference network's logits by the tutorial's operations in the tutorial's order."""

    def convolution(maps, layer):
        sums = tf.nn.conv2d(maps, variables[f"{layer}/weights"], 1, "SAME")
        return tf.nn.relu(tf.nn.bias_add(sums, variables[f"{layer}/biases"]))

    def max_pool(maps):
        return tf.nn.max_pool2d(maps, 3, 2, "SAME")

    def normalization(maps):
        squares = tf.pad(tf.square(maps), [(0, 0)] * 3 + [(4, 4)])
        energy = tf.add_n([squares[..., k : k + maps.shape[-1]] for k in range(9)])
        return maps * (1 + 0.001 / 9 * energy) ** -0.75

    def affine(rows, layer):
        return tf.matmul(rows, variables[f"{layer}/weights"]) + variables[f"{layer}/biases"]

    x = convolution(normalization(max_pool(convolution(images, "conv1"))), "conv2")
    x = tf.reshape(max_pool(normalization(x)), [-1, 2304])
    x = tf.nn.relu(affine(tf.nn.relu(affine(x, "local3")), "local4"))
    return affine(x, "softmax_linear")


def train_plainly(initial, batches):
    """Momentum and moving averages written out as assignments; batches: as of read_batches. In float64."""
    with tf.Graph().as_default(), v1.Session() as session:
        images, labels = v1.placeholder(tf.float64, batches[0][0].shape), v1.placeholder(tf.int32, [GLOBAL_BATCH])
        rate, share = v1.placeholder(tf.float64, []), v1.placeholder(tf.float64, [])
        weights = {name: tf.Variable(np.float64(value)) for name, value in initial.items()}
        accumulators = {name: tf.Variable(np.zeros(value.shape)) for name, value in initial.items()}
        averages = {name: tf.Variable(np.float64(value)) for name, value in initial.items()}

        logits = plain_network(images, weights)
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
            feed |= {rate: RATE * DECAY_FACTOR**decays, share: moved}
            losses.append(session.run([loss, average], feed)[0])
        found = {"": weights, "/Momentum": accumulators, "/ExponentialMovingAverage": averages}
        final = {name + kind: v for kind, variables in found.items() for name, v in variables.items()}
        return losses, session.run(final)
