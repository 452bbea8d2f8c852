"""Examples stay on a GPU once they have come there, by the registry of TensorFlow's kernels."""

import fake_gpus
import pytest
import tensorflow as tf

import cifar10
from tower_train.graph import devices, stream, transfer
from tower_train.graph.layout import Layout
from tower_train.workload import DataRequest


@pytest.mark.parametrize("model", ["convnet", "cifar10_94"])
def test_examples_stay_on_a_gpu_once_they_are_there(model, cifar10_dir):
    """Kernels of int32, for one, take their tensors from the host."""
    workload = cifar10.WORKLOAD.with_options({"model": model})
    examples = workload.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    placed = devices.place(workload.config(), gpus_here=["one"])
    way = transfer.choose_transfer("auto", workload, examples, placed.towers, end=1000)
    with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
        stream.training_stream(workload, examples, 0, tf.constant(0, tf.int64), Layout(64, placed.towers), way)
    looked_at = 0
    for op in graph.get_operations():
        if "GPU" in op.device:
            kernel = fake_gpus.kernel_of(op.node_def)
            for arguments, tensors in ((op.op_def.input_arg, op.inputs), (op.op_def.output_arg, op.outputs)):
                for argument, tensor in zip(arguments, tensors, strict=False):
                    looked_at += tensor.shape.num_elements() is not None
                    if argument.name in kernel.host_memory_arg and tensor.dtype != tf.resource:
                        assert tensor.shape.num_elements() <= 64, (op.name, argument.name)  # a number an example
    assert looked_at > 20
