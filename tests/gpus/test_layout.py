"""The form that networks take on GPUs: the same mathematics as on CPUs, and the order of axes hardly ever changed."""

import functools

import pytest
import tensorflow as tf
import trainings
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

import cifar10
from tower_train import layers
from tower_train.graph import devices, training
from tower_train.workload import DataRequest

v1 = tf.compat.v1


def workload(model):
    return cifar10.WORKLOAD.with_options({"model": model})


@functools.cache
def examples(model):
    return workload(model).examples(DataRequest("train", "generated"))


def test_what_a_gpu_computes_is_what_a_cpu_computes(monkeypatch):
    """The tutorial's losses and variables, in float64; the form for GPUs runs on the CPU here. Of cifar10_94,
    tests/cifar10/test_cifar10_94.py holds both forms against a third one."""
    options = dict(steps=2, dtype="float64", global_batch_size=2, num_gpus=1, learning_rate=0.01)
    on_cpu = trainings.train(workload("convnet"), examples("convnet"), **options)
    monkeypatch.setattr(layers, "on_gpu", lambda: True)
    trainings.assert_same(trainings.train(workload("convnet"), examples("convnet"), **options), on_cpu)


def test_a_layer_is_told_where_it_computes():
    with tf.Graph().as_default():
        for device, expected in (("/cpu:0", False), ("/gpu:1", True), ("/job:worker/task:1/gpu:0", True)):
            with tf.device(device):
                assert layers.on_gpu() == expected


def laid_out(model, capability, **options):
    """The nodes of a step on one GPU of a compute capability, as TensorFlow's layout optimizer leaves them: those that
    its report needs."""
    config = workload(model).config(num_gpus=1, batch_size=64, summary_every_steps=0, **options)
    built = training.training_graph(workload(model), examples(model), config, devices.place(config, ["one"]))
    before = built.graph.as_graph_def()
    assert not [node.name for node in before.node if node.op == "Transpose" and "GPU" in node.device]
    with built.graph.as_default():
        graph = v1.train.export_meta_graph()
    fetched = meta_graph_pb2.CollectionDef()
    fetched.node_list.value.extend(tensor.name for tensor in tf.nest.flatten(built.report))
    graph.collection_def["train_op"].CopyFrom(fetched)
    config = config_pb2.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes, rewriting.meta_optimizer_iterations = -1, 1
    rewriting.optimizers.append("layout")
    about = dict(type="GPU", vendor="NVidia", frequency=1500, num_cores=80, memory_size=2**34)
    gpu = device_properties_pb2.DeviceProperties(
        **about, environment={"architecture": capability, "cuda": "12050", "cudnn": "9000"}
    )
    cpu = device_properties_pb2.DeviceProperties(type="CPU", frequency=2000, num_cores=4)
    machine = cluster.Cluster(
        devices=[
            device_properties_pb2.NamedDevice(name="/device:CPU:0", properties=cpu),
            device_properties_pb2.NamedDevice(name="/device:GPU:0", properties=gpu),
        ]
    )
    after = tf_optimizer.OptimizeGraph(config, graph, cluster=machine)
    return v1.graph_util.extract_sub_graph(after, [tensor.op.name for tensor in tf.nest.flatten(built.report)]).node


@pytest.mark.parametrize(
    ("model", "capability", "dtype", "expected"),
    [
        ("convnet", "7.0", "float32", 4),
        ("cifar10_94", "8.0", "bfloat16", 0),
        ("resnet20", "7.0", "float32", 11),
    ],
)
def test_tensorflow_changes_few_orders_of_axes(model, capability, dtype, expected):
    """To NCHW and back, at the ends of the network: of the images, and of what the last layers flatten or reduce."""
    nodes = laid_out(model, capability, dtype=dtype)
    assert sum(node.op == "Transpose" for node in nodes) <= expected
