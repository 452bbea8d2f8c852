"""Places of variables and updates, and messages between devices. Read from graphs for GPUs, which need not be there."""

import dataclasses
import functools
import re

import norm_workload
import pytest
import trainings

import cifar10
from tower_train.config import Config
from tower_train.graph import devices
from tower_train.graph.random_state import ancestors
from tower_train.workload import DataRequest

GPUS = 2


def graph_of(workload, examples, num_workers=1, **options):
    config = Config(num_gpus=GPUS, batch_size=2, optimizer="momentum", ema=0.9, **options)
    placed = devices.place(config, gpus_here=["one", "another"])
    placed = dataclasses.replace(placed, num_workers=num_workers, worker=num_workers - 1)
    return trainings.build(workload, examples, config, placed)


@functools.cache
def small_graph(**options):
    """Of a small network, mirrored."""
    workload, examples = norm_workload.WORKLOAD, norm_workload.load(None)
    return graph_of(workload, examples, variable_update="mirrored", **options).graph


@pytest.fixture
def tutorial(cifar10_dir):
    """The graph of the reference network, with these options of `graph_of`."""
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    return functools.partial(graph_of, cifar10.WORKLOAD, examples)


def nodes_of(graph):
    """Those of functions, such as the update's, included."""
    definition = graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def test_variables_and_updates_are_on_the_host_and_towers_on_their_gpus(tutorial):
    """Weights, momentum, moving averages and counters; but the next batches' images and labels wait on the GPUs."""
    nodes = nodes_of(tutorial(variable_update="cpu").graph)
    variables = [node for node in nodes if node.op in ("VarHandleOp", "VariableV2")]
    waiting = {node.name: node.device for node in variables if node.name.startswith("input/staged/part_")}
    assert sorted(waiting.values()) == [f"/device:GPU:{i}" for i in range(GPUS) for _ in range(2)]
    others = [node for node in variables if node.name not in waiting]
    assert len(others) == 3 * 10 + 2 + 1  # and the position of these batches
    updates = [node for node in nodes if re.search("Assign|Apply|Scatter", node.op) and not waiting.keys() & node.input]
    assert len([node for node in updates if node.op == "ResourceApplyMomentum"]) == 10
    assert {node.device for node in others + updates} == {"/device:CPU:0"}
    arithmetic = re.compile(
        r"tower_([0-9]+)/(?!preprocess/|.*/(?:activations|sparsity)\b)"
    )  # summaries have no kernels
    of_towers = [node for node in nodes if arithmetic.match(node.name) and node.op != "ReadVariableOp"]
    assert len(of_towers) > 100 * GPUS
    for node in of_towers:
        assert node.device == f"/device:GPU:{arithmetic.match(node.name)[1]}", node.name


def test_each_mirrored_copy_is_kept_and_updated_on_its_towers_device():
    found = {node.name: node.device for node in nodes_of(small_graph()) if node.op == "VarHandleOp"}
    for name in ("kernel", "kernel/Momentum", "norm/moving_mean", "softmax/ExponentialMovingAverage"):
        assert (found[name], found[f"copy_1/{name}"]) == ("/device:GPU:0", "/device:GPU:1")
    assert found["global_step"] == "/device:CPU:0"


@pytest.mark.parametrize(
    ("kind", "hint", "workers"), [("collective", b"ring", 1), ("nccl", b"nccl", 1), ("nccl", b"nccl", 2)]
)
def test_small_tensors_are_sent_together_and_by_nccl_in_one_order(kind, hint, workers):
    """The gradients in one message, the loss and the statistics in another; the embedding's rows are joined. Two of
    NCCL's that wait for each other on two devices would wait for ever."""
    messages = {}
    for op in small_graph(all_reduce=kind, num_workers=workers, batch_norm="tower").get_operations():
        if op.type == "CollectiveReduce":
            assert op.get_attr("communication_hint") == hint
            messages.setdefault(op.get_attr("instance_key"), []).append(op)
    assert len(messages) == 2
    assert "CollectiveReduce" not in {
        op.type for op in small_graph(all_reduce="add_n", batch_norm="tower").get_operations()
    }
    first, second = (messages[key] for key in sorted(messages))
    assert len({op.device for op in first}) == len({op.device for op in second}) == len(first) == GPUS // workers
    for op in second if kind == "nccl" else ():
        assert set(first) <= ancestors([op])


@pytest.mark.parametrize("update", ["cpu", "mirrored"])
def test_the_ring_between_workers_carries_each_gradient_once_however_many_towers_they_have(update, tutorial):
    """Besides, the loss and whether to stop. A ring of W sends 2 (W - 1)/W of what it carries."""
    built = tutorial(variable_update=update, device="cpu", num_workers=2)
    rings = [op for op in built.graph.get_operations() if op.type == "CollectiveReduce"]
    assert sum(op.inputs[0].shape.num_elements() for op in rings) == built.saved.num_parameters + 2
    assert len(rings) == 3  # local3/weights, all other gradients, and the two numbers
    assert {op.get_attr("group_size") for op in rings} == {2}
    copies = {op.type for op in built.graph.get_operations() if "Bcast" in op.type}
    assert copies == {"CollectiveBcastRecv"}, "the chief's, of which this worker is none"
