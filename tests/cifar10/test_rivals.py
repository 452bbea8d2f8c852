"""The rivals train the same network on the same images: what differs is how, not what."""

import json

import jobs
import keras
import learned
import numpy as np
import pytest
import sides
import tensorflow as tf

import cifar10
from cifar10 import records, rivals, source
from cifar10.rivals import keras_networks, port

v1 = tf.compat.v1
MODELS = ["convnet", "cifar10_94", "cifar10_95"]


def test_the_port_reads_standardised_crops(request_for):
    files = [str(source.locate(request_for)[0] / name) for name in records.FILES["train"]]
    with tf.Graph().as_default(), v1.Session() as session:
        batch = port.distorted_inputs(files, num_examples=200, batch=16)
        coordinator = v1.train.Coordinator()
        threads = v1.train.start_queue_runners(session, coordinator)
        images, labels = session.run(batch)
        coordinator.request_stop()
        session.close()
        coordinator.join(threads)
    assert images.shape == (16, 24, 24, 3) and labels.shape == (16,)
    assert set(labels) <= set(range(10))
    np.testing.assert_allclose(images.mean(axis=(1, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(images.std(axis=(1, 2, 3)), 1, atol=1e-3)


def test_the_port_learns(request_for):
    losses = []

    def after_step(loss):
        losses.append(loss)
        return learned.are_enough(losses)

    port.train(request_for, 16, after_step, num_towers=2)
    assert learned.have_fallen(losses)


def test_the_port_has_the_reference_network():
    """With the same weights, the same logits."""
    images = np.random.default_rng(0).normal(size=[4, 24, 24, 3]).astype(np.float32)
    logits, variables = [], []
    for inference in (port.inference, lambda features: cifar10.WORKLOAD.inference(features, True)):
        with tf.Graph().as_default(), v1.Session() as session:
            outputs = inference(tf.constant(images))
            there = {v.op.name: v for v in v1.trainable_variables()}
            rng = np.random.default_rng(1)
            for name in sorted(there):
                there[name].load(rng.normal(0, 0.05, there[name].shape), session)
            variables.append({name: v.shape.as_list() for name, v in there.items()})
            logits.append(session.run(outputs))
    assert variables[0] == variables[1]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4)


KERAS_SIDES = ["keras/fit", "keras/MirroredStrategy 2"]
KERAS = """
import functools, json, sys
import cifar10
import learned
import sides
from cifar10 import rivals
from tower_train.workload import DataRequest

losses = {}
def after_step(name, loss):
    losses.setdefault(name, []).append(loss)
    return learned.are_enough(learned.of_running_means(losses[name]))
found = rivals.of(cifar10.WORKLOAD.options)
for rival in sorted(found, key=lambda rival: "Mirrored" not in rival.name):  # which sets up devices, once and first
    if rival.name in sys.argv[2:]:
        train = functools.partial(sides.trained_by(rival), DataRequest("train", "cifar10", sys.argv[1]), 16)
        train(functools.partial(after_step, rival.name))
print(json.dumps(losses))
"""


@pytest.fixture(scope="module")
def keras_losses(request_for):
    """The losses that KERAS prints, in a process of its own, whose devices nobody has used yet."""
    done = jobs.command("-c", KERAS, request_for.data_dir, *KERAS_SIDES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", KERAS_SIDES)
def test_keras_learns(keras_losses, name):
    assert learned.have_fallen(learned.of_running_means(keras_losses[name]))


def rivals_of(model):
    return rivals.of(cifar10.WORKLOAD.with_options({"model": model}).options)


@pytest.mark.parametrize("model", MODELS)
def test_keras_has_the_networks_layer_for_layer(our_network, model):
    """The same variables in the same layers, trained or not, and so the same outputs and weight decay."""
    theirs = keras_networks.NETWORKS[model]()
    images = np.random.default_rng(0).normal(size=[2, *theirs.input_shape[1:]]).astype(np.float32)
    values, logits, decay = our_network(model, images)
    names = {"kernel": "weights", "bias": "biases"}
    for variable in theirs.variables:
        scope, name = variable.path.split("/")[-2:]
        variable.assign(values.pop(f"{scope.replace('.', '/')}/{names.get(name, name)}"))
    assert not values
    np.testing.assert_allclose(theirs(images), logits, rtol=1e-3, atol=1e-3)
    assert float(sum(theirs.losses)) == pytest.approx(decay, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_the_arithmetic_is_that_of_the_layers(model):
    """Two operations for each product; three times, but where the images or kernels that are not trained come in."""
    total, network = 0, keras_networks.NETWORKS[model]()
    for layer in network.layers:
        kernel, outputs = getattr(layer, "kernel", None), layer.output
        if kernel is not None:
            is_trained = any(kernel is variable for variable in network.trainable_variables)
            is_first = layer.input is network.inputs[0]
            count = 2 * np.prod(outputs.shape[1:]) * np.prod(kernel.shape[:-1])
            total += count * (1 + is_trained + (not is_first))
    options = cifar10.WORKLOAD.with_options({"model": model}).options
    assert rivals.flops_per_example(options) == total


def test_keras_learns_cifar10_94_in_bfloat16(losses_of):
    """Keras tells the mean of the losses so far."""
    (rival,) = (rival for rival in rivals_of("cifar10_94") if rival.name == "keras/fit bfloat16")
    try:
        losses = losses_of(sides.trained_by(rival), steps=20)
    finally:
        keras.config.set_dtype_policy("float32")  # of the other tests in this process
    assert losses[-1] < losses[0] - 0.3
