"""N towers against one, in float64: on the parts of one card or on several cards. Without GPUs, on the CPU."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

import cifar10
from gpu_checks import trials
from tower_train.config import Config
from tower_train.graph import collectives, devices
from tower_train.workload import DataRequest

COUNT = trials.places(parts_megabytes=4000)
STEPS, GLOBAL_BATCH = 10, 24
OPTIONS = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, seed=1, device="auto")
REDUCES = ("add_n", "collective", "nccl")


def skip_nccl_on_parts(kind):
    if kind == "nccl" and len(trials.gpus()) < 2:
        pytest.skip("NCCL needs several GPUs")


@functools.cache
def train(model, count, kind=None):
    workload, request = toy_workload.WORKLOAD, DataRequest("train", "toy")
    if model != "toy":
        workload, request = cifar10.WORKLOAD.with_options({"model": model}), DataRequest("train", "generated")
    update = dict(variable_update="mirrored", all_reduce=kind) if kind else {}
    options = OPTIONS | dict(num_gpus=count, batch_size=GLOBAL_BATCH // count) | update
    return trainings.train(workload, workload.examples(request), STEPS, **options)[1]


@pytest.mark.parametrize("kind", [None, *REDUCES])
@pytest.mark.parametrize("model", ["toy", "convnet"])
def test_towers_are_one(model, kind):
    """All devices first: they are placed before one is used."""
    skip_nccl_on_parts(kind)
    trials.assert_same(train(model, COUNT, kind), train(model, 1))


@pytest.mark.parametrize("kind", REDUCES)
def test_means_are_the_known_ones(kind):
    """NCCL in TensorFlow was reported to give wrong means without any error (tensorflow#41539, #62493).

    Only device j % COUNT has a number at place j, the others 0, so that any part that is lost, repeated or misplaced
    shows, in a large message and in small ones.
    """
    skip_nccl_on_parts(kind)
    placed = devices.place(Config(num_gpus=COUNT))
    sizes = (collectives.MESSAGE_BYTES // 4, 1000, 1000)
    numbers = [1 + np.arange(size, dtype=np.float32) // COUNT % 8 for size in sizes]
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(tf.float32, [size]) for size in sizes]  # no constants to be averaged beforehand
        values = []
        for i, device in enumerate(placed.towers):
            with tf.device(device):
                values.append([tf.where(tf.equal(tf.range(each.shape[0]) % COUNT, i), each, 0) for each in fed])
        means = collectives.AllReduce(placed.towers, kind).mean(values)
        with tf.compat.v1.Session(graph=graph, config=placed.session_config) as session:
            found = session.run(means, dict(zip(fed, numbers, strict=True)))
    for of_device in found:
        for mean, expected in zip(of_device, numbers, strict=True):
            np.testing.assert_allclose(mean * COUNT, expected, rtol=1e-6)
