"""Images to learn and our networks' values, for the tests of the rivals."""

import numpy as np
import pytest
import tensorflow as tf

import cifar10
from cifar10 import records
from tower_train.workload import DataRequest

v1 = tf.compat.v1
CLASSES, PER_FILE = 10, 40


@pytest.fixture(scope="session")
def request_for(tmp_path_factory):
    """A DataRequest for images whose class is easily seen: a pattern of its own, and noise."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, [CLASSES, 3, 4, 4]).repeat(8, axis=2).repeat(8, axis=3)
    directory = tmp_path_factory.mktemp("patterns")
    for name in records.ALL_FILES:
        labels = np.arange(PER_FILE) % CLASSES
        images = np.clip(patterns[labels] + rng.integers(-30, 31, [PER_FILE, 3, 32, 32]), 0, 255)
        np.column_stack([labels, images.reshape(PER_FILE, -1)]).astype(np.uint8).tofile(directory / name)
    return DataRequest("train", "cifar10", str(directory))


@pytest.fixture(scope="session")
def our_network(request_for):
    """(model, images, training) -> {variable name: value}, logits, weight decay; with random biases and statistics."""

    def run(model, images, training=False):
        workload, rng = cifar10.WORKLOAD.with_options({"model": model}), np.random.default_rng(1)
        with tf.Graph().as_default(), v1.Session() as session:
            network = workload.for_examples(workload.examples(request_for)).inference
            logits = network(tf.constant(images), training)
            decay = tf.add_n(v1.losses.get_regularization_losses())
            variables = {variable.op.name: variable for variable in v1.global_variables()}
            session.run(v1.global_variables_initializer())
            for variable in variables.values():
                if variable.shape.rank == 1:  # they begin at 0 or 1, which would hide them
                    variable.load(rng.uniform(0.5, 1.5, variable.shape), session)
            return session.run((variables, logits, decay))

    return run


@pytest.fixture
def losses_of(request_for):
    """(Side.train, steps) -> the losses of steps of 16 of these images."""

    def run(train, steps):
        losses = []

        def after_step(loss):
            losses.append(loss)
            return len(losses) == steps

        train(request_for, 16, after_step)
        return losses

    return run
