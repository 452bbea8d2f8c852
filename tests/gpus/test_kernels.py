"""Every node that is put on a GPU has a kernel there, by the registry of TensorFlow's wheel, which holds CUDA's too."""

import kernel_registry
import pytest

import cifar10
from tower_train.config import Config
from tower_train.graph import devices, training
from tower_train.workload import DataRequest


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
    on_gpus = kernel_registry.nodes_on_gpus(definition)
    assert len(on_gpus) > 100
    assert kernel_registry.lacking(on_gpus) <= kernel_registry.EXCEPTIONS.keys()
