"""N towers on the reference workload, augmentations included, train what a program for one device trains.

That program has one tower of the published script, as cifar10/multi_gpu_train.py has it, and TensorFlow 1's own
optimizer and schedule; its images are random.
"""

import numpy as np
import tensorflow as tf
import trainings

import cifar10
from cifar10 import multi_gpu_train
from tower_train.graph import stream
from tower_train.workload import DataRequest

v1 = tf.compat.v1

GLOBAL_BATCH, STEPS = 8, 6
RATE, MOMENTUM = 0.01, 0.9
DECAY_FACTOR, EPOCHS_PER_DECAY = 0.5, 0.08  # of 200 examples: after steps 2 and 4


def test_eight_towers_match_a_plain_single_device_training(cifar10_dir, monkeypatch):
    """The loss of every step; in the end weights, momentum, moving averages and counters."""
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    options = dict(num_gpus=8, batch_size=GLOBAL_BATCH // 8, dtype="float64", optimizer="momentum", momentum=MOMENTUM)
    options |= dict(learning_rate=RATE, learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY)
    with trainings.opened(cifar10.WORKLOAD, examples, **options) as (built, session):
        variables = {variable.op.name: variable for variable in built.saved.variables}
        initial = session.run(variables)
        losses, final = [session.run(built.report).loss for _ in range(STEPS)], session.run(variables)
    monkeypatch.setattr(tf.nn, "lrn", normalization)
    monkeypatch.setattr(multi_gpu_train, "_variable", in_float64)
    expected_losses, expected = train_plainly(initial, read_batches(examples))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    assert len(expected) == 3 * 10 + 1  # ten weights and biases, each with its momentum and its moving average
    assert final.pop("examples_seen") == STEPS * GLOBAL_BATCH and final.keys() == expected.keys()
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


def normalization(maps, radius, bias, alpha, beta):
    """tf.nn.lrn, which has no kernel for float64."""
    squares = tf.pad(tf.square(maps), [(0, 0)] * 3 + [(radius, radius)])
    energy = tf.add_n([squares[..., k : k + maps.shape[-1]] for k in range(2 * radius + 1)])
    return maps * (bias + alpha * energy) ** -beta


def in_float64(name, shape, initializer):
    return v1.get_variable(name, shape, tf.float64, initializer)


def train_plainly(initial, batches):
    """The losses, and {variable's name: value} after the last step; batches: as of read_batches."""
    with tf.Graph().as_default(), v1.Session() as session:
        images, labels = v1.placeholder(tf.float64, batches[0][0].shape), v1.placeholder(tf.int32, [GLOBAL_BATCH])
        step, decay_steps = v1.train.create_global_step(), round(EPOCHS_PER_DECAY * 200) // GLOBAL_BATCH
        start, momentum = (tf.constant(number, tf.float64) for number in (RATE, MOMENTUM))
        rate = v1.train.exponential_decay(start, step, decay_steps, DECAY_FACTOR, staircase=True)
        loss = multi_gpu_train.tower_loss(None, images, labels)
        update = v1.train.MomentumOptimizer(rate, momentum).minimize(loss, step)
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        weights = {name: variable for name, variable in variables.items() if variable.trainable}
        session.run(v1.global_variables_initializer())
        for name, variable in variables.items():
            variable.load(initial[name], session)
        losses, averages = [], {name: initial[name] for name in weights}
        for i, batch in enumerate(batches):
            losses.append(session.run([loss, update], {images: batch[0], labels: batch[1]})[0])
            share = 1 - (1 + i) / (10 + i)  # the rule of tf.train.ExponentialMovingAverage, which is in float32
            averages = {
                name: averages[name] + share * (value - averages[name]) for name, value in session.run(weights).items()
            }
        averages = {f"{name}/ExponentialMovingAverage": value for name, value in averages.items()}
        return losses, session.run(variables) | averages
