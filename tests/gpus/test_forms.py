"""The form that networks take on GPUs: the same mathematics as on CPUs."""

import pytest
import tensorflow as tf
import trainings

import cifar10
from tower_train import layers
from tower_train.graph import devices
from tower_train.workload import DataRequest


def workload_and_examples(model):
    workload = cifar10.WORKLOAD.with_options({"model": model})
    return workload, workload.examples(DataRequest("train", "generated"))


def test_what_a_gpu_computes_is_what_a_cpu_computes(monkeypatch):
    """The tutorial's losses and variables, in float64; the form for GPUs runs on the CPU here. Of cifar10_94,
    tests/cifar10/test_cifar10_94.py holds both forms against a third one."""
    what = (*workload_and_examples("convnet"), 2)
    options = dict(dtype="float64", global_batch_size=2, num_gpus=1, learning_rate=0.01)
    on_cpu = trainings.train(*what, **options)
    monkeypatch.setattr(layers, "on_gpu", lambda: True)
    trainings.assert_same(trainings.train(*what, **options), on_cpu)


def test_a_layer_is_told_where_it_computes():
    with tf.Graph().as_default():
        for device, expected in (("/cpu:0", False), ("/gpu:1", True), ("/job:worker/task:1/gpu:0", True)):
            with tf.device(device):
                assert layers.on_gpu() == expected


@pytest.mark.parametrize("model", ["convnet", "cifar10_94", "resnet20"])
def test_no_network_changes_the_order_of_axes_on_a_gpu(model):
    workload, examples = workload_and_examples(model)
    config = workload.config(num_gpus=1, batch_size=64, summary_every_steps=0, dtype="float32")
    built = trainings.build(workload, examples, config, devices.place(config, ["one"]))
    on_gpu = [op for op in built.graph.get_operations() if "GPU" in op.device]
    assert len(on_gpu) > 100 and "Transpose" not in {op.type for op in on_gpu}
