"""Every node that is put on a GPU has a kernel there, by the registry of TensorFlow's wheel, which holds CUDA's too."""

import functools

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import cifar10
from tower_train.config import Config
from tower_train.graph import devices, stream, training, transfer
from tower_train.workload import DataRequest

# Soft placement puts these on the CPU: {(op, dtype): why}.
EXCEPTIONS = {("SparseSoftmaxCrossEntropyWithLogits", "float64"): "no network is trained in float64 for its speed"}


@functools.cache
def registered(op):
    return [kernel for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT")]  # fmt: skip


def has_kernel(node):
    return any(all(allows(constraint, node) for constraint in kernel.constraint) for kernel in registered(node.op))


def allows(constraint, node):
    value = node.attr[constraint.name]
    found = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
    return found <= set(constraint.allowed_values.list.type)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("convnet", dict(variable_update="mirrored", all_reduce="nccl", optimizer="momentum")),
        ("convnet", dict(variable_update="mirrored", all_reduce="add_n", dtype="float64", accumulate_steps=2)),
        ("convnet", dict(variable_update="mirrored", all_reduce="collective", dtype="bfloat16", clip_gradients=1.0)),
        ("convnet", dict(optimizer="adam")),
        ("resnet20", dict(sync_batch_norm=True, optimizer="lars")),
        ("minigooglenet", dict(dtype="bfloat16")),
        ("cifar10_94", dict(dtype="bfloat16", lookahead_every_steps=2)),
    ],
)  # fmt: skip
def test_every_operation_on_a_gpu_has_a_kernel_there(model, options, cifar10_dir):
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    config: Config = workload.config(num_gpus=2, batch_size=4, summary_every_steps=0, **options)
    placed = devices.place(config, gpus_here=["one", "another"])
    definition = training.training_graph(workload, examples, config, placed).graph.as_graph_def()
    functions = {function.signature.name for function in definition.library.function}
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    on_gpus = [node for node in nodes if "GPU" in node.device and node.op not in functions]
    assert len(on_gpus) > 100
    lacking = {(node.op, tf.as_dtype(node.attr["T"].type).name) for node in on_gpus if not has_kernel(node)}
    assert lacking <= EXCEPTIONS.keys()


@pytest.mark.parametrize("model", ["convnet", "cifar10_94", "resnet20"])
def test_examples_stay_on_a_gpu_once_they_are_there(model, cifar10_dir):
    """Kernels of int32, for one, take their tensors from the host."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    placed = devices.place(workload.config(), gpus_here=["one"])
    way = transfer.choose("auto", workload, examples, placed.towers, end=1000)
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
        stream.training_stream(workload, examples, 0, tf.constant(0, tf.int64), stream.Split(64, 1), way)
    looked_at = 0
    for op in graph.get_operations():
        if "GPU" in op.device:
            kernel = next(
                kernel for kernel in registered(op.type) if all(allows(c, op.node_def) for c in kernel.constraint)
            )
            for arguments, tensors in ((op.op_def.input_arg, op.inputs), (op.op_def.output_arg, op.outputs)):
                for argument, tensor in zip(arguments, tensors, strict=False):
                    looked_at += tensor.shape.num_elements() is not None
                    if argument.name in kernel.host_memory_arg and tensor.dtype != tf.resource:
                        assert tensor.shape.num_elements() <= 64, (op.name, argument.name)  # a number an example
    assert looked_at > 20
