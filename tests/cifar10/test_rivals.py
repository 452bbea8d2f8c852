"""The rivals train the same network on the same images: what differs is how, not what."""

import contextlib
import functools
import json

import jobs
import keras
import learned
import numpy as np
import pytest
import tensorflow as tf

import cifar10
from cifar10 import records, rivals, source
from cifar10.rivals import keras_networks, port
from tower_train import host
from tower_train.bench import flops

v1 = tf.compat.v1
MODELS = ["convnet", "cifar10_94", "cifar10_95", "resnet20", "resnet56", "minigooglenet"]


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


def test_the_port_averages_gradients():
    rng = np.random.default_rng(0)
    towers = rng.normal(size=[3, 2, 4, 5])  # towers, variables, and their shape
    with tf.Graph().as_default(), v1.Session() as session:
        averaged = port.average_gradients([[(tf.constant(g), f"v{i}") for i, g in enumerate(t)] for t in towers])
        found = session.run([grad for grad, _ in averaged])
    assert [variable for _, variable in averaged] == ["v0", "v1"]
    np.testing.assert_allclose(found, towers.mean(axis=0))


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


KERAS_SIDES = ["keras/fit", "keras/MirroredStrategy 2", "keras/multi_gpu_model 2"]
KERAS = """
import functools, json, sys
import cifar10
import learned
from cifar10 import rivals
from tower_train.workload import DataRequest

losses = {}
def after_step(name, loss):
    losses.setdefault(name, []).append(loss)
    return learned.are_enough(learned.of_running_means(losses[name]))
found = rivals.of(cifar10.WORKLOAD.options)
for rival in sorted(found, key=lambda rival: "Mirrored" not in rival.name):  # which sets up devices, once and first
    if rival.name in sys.argv[2:]:
        train = functools.partial(rival.train, DataRequest("train", "cifar10", sys.argv[1]), 16)
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


WORKER_STEPS = 80  # both must do as many
WORKER = """
import sys
from cifar10.rivals import multi_worker
from tower_train.workload import DataRequest

losses = []
def after_step(loss):
    losses.append(loss)
    return len(losses) == int(sys.argv[2])
multi_worker.train(DataRequest("train", "cifar10", sys.argv[1]), 16, after_step)
print(*losses)
"""


def test_workers_under_keras_strategy_learn(request_for):
    hosts = host.free_addresses(2)
    places = [{"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}} for index in range(2)]
    with contextlib.ExitStack() as stack:
        start = functools.partial(jobs.Program, "-c", WORKER, request_for.data_dir, str(WORKER_STEPS))
        workers = [stack.enter_context(start(TF_CONFIG=json.dumps(place))) for place in places]
        for worker in workers:
            assert worker.process.wait(jobs.WAIT_SECS) == 0, worker.output()
            assert learned.have_fallen([float(loss) for loss in worker.output().splitlines()[-1].split()])


@pytest.mark.parametrize("model", MODELS)
def test_the_rivals_have_what_the_benchmark_asks_for(model):
    found = rivals.of(cifar10.WORKLOAD.with_options({"model": model}).options)
    names = [rival.name for rival in found]
    assert names[0] == ("port" if model == "convnet" else "keras/fit") and "keras/fit" in names
    assert len(set(names)) == len(names)
    if model == "convnet":
        with tf.Graph().as_default():
            assert found[0].plain_inference(v1.placeholder(tf.float32, [4, 24, 24, 3])).shape == [4, 10]


@pytest.mark.parametrize("model", sorted({*MODELS} - {"resnet56"}))  # it is resnet20's code
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


@pytest.mark.parametrize(
    ("model", "count"), [("cifar10_94", 1_971_352), ("cifar10_95", 4_604_440), ("resnet56", 853_018)]
)
def test_keras_trains_as_many_numbers(model, count):
    """As test_cifar10_94, whose whitening kernels are not trained, and test_models count."""
    trained = keras_networks.NETWORKS[model]().trainable_variables
    assert sum(np.prod(variable.shape) for variable in trained) == count


def test_the_arithmetic_of_cifar10_94_is_that_of_its_plain_layers():
    whitening, conv1 = 31 * 31 * 24 * 2 * 2 * 3, 31 * 31 * 64 * 9 * 24
    others = 15 * 15 * 64 * 9 * 64 + 15 * 15 * 256 * 9 * 64 + (7 * 7 * 2 + 3 * 3) * 256 * 9 * 256 + 256 * 10
    found = rivals.of(cifar10.WORKLOAD.with_options({"model": "cifar10_94"}).options)
    with tf.Graph().as_default():
        logits = found[0].plain_inference(v1.placeholder(tf.float32, [4, 32, 32, 3]))
        assert flops.training_flops(tf.reduce_sum(logits)) == 4 * 2 * (whitening + 3 * (conv1 + others))


def test_keras_learns_cifar10_94_in_bfloat16(losses_of):
    """Keras tells the mean of the losses so far."""
    found = rivals.of(cifar10.WORKLOAD.with_options({"model": "cifar10_94"}).options)
    (rival,) = (rival for rival in found if rival.dtype == "bfloat16" and rival.name.startswith("keras"))
    try:
        losses = losses_of(rival.train, steps=20)
    finally:
        keras.config.set_dtype_policy("float32")  # of the other tests in this process
    assert losses[-1] < losses[0] - 0.3
