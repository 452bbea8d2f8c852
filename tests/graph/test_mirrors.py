"""Mirrored variables train what variables on the CPU train, and their copies stay the same to the bit."""

import dataclasses
import functools

import norm_workload
import pytest
import tensorflow as tf
import trainings

import cifar10
from tower_train import errors
from tower_train.config import Config
from tower_train.graph import devices, training
from tower_train.workload import DataRequest, Workload

v1 = tf.compat.v1

STEPS = 20
TRAIN = dict(dtype="float64", learning_rate=0.05, ema=0.9, batch_size=4)


def make():
    return norm_workload.WORKLOAD, norm_workload.load(None)


CLIPPING, SYNC = "two, accumulating and clipping", "three, synchronised"
CASES = {
    CLIPPING: dict(num_gpus=2, accumulate_steps=2, clip_gradients=0.1, optimizer="momentum"),
    SYNC: dict(num_gpus=3, sync_batch_norm=True, optimizer="adam", learning_rate=0.01),
}


@functools.cache
def train_on_cpu(case):
    return trainings.train(*make(), STEPS, **(TRAIN | CASES[case]))


@pytest.mark.parametrize(("case", "kind"), [(CLIPPING, "collective"), (CLIPPING, "add_n"), (SYNC, "collective")])
def test_mirrored_variables_end_with_the_values_of_those_on_the_cpu(case, kind):
    """Losses of every step; weights, optimizer's slots, moving statistics and averages at the end."""
    found = trainings.train(*make(), STEPS, variable_update="mirrored", all_reduce=kind, **(TRAIN | CASES[case]))
    trainings.assert_same(found, train_on_cpu(case))


def graph_for_gpus(num_workers=1, **options):
    """The training graph for two GPUs, which need not be there."""
    config = Config(num_gpus=2, batch_size=2, optimizer="momentum", variable_update="mirrored", **options)
    workload, examples = make()
    placed = devices.place(config, gpus_here=["one", "another"])
    placed = dataclasses.replace(placed, num_workers=num_workers)
    return training.training_graph(workload, examples, config, placed).graph


def nodes(**options):
    definition = graph_for_gpus(**options).as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def test_each_copy_is_kept_and_updated_on_its_towers_device():
    found = {node.name: node.device for node in nodes() if node.op == "VarHandleOp"}
    for name in ("kernel", "kernel/Momentum", "norm/moving_mean", "softmax/ExponentialMovingAverage"):
        assert (found[name], found[f"copy_1/{name}"]) == ("/device:GPU:0", "/device:GPU:1")
    assert found["global_step"] == "/device:CPU:0"


@pytest.mark.parametrize("kind", ["collective", "nccl"])
def test_small_tensors_are_sent_together(kind):
    """The gradients in one message, the loss and the statistics in another; the embedding's rows are joined."""
    reductions = [node for node in nodes(all_reduce=kind) if node.op == "CollectiveReduce"]
    assert sorted(node.device for node in reductions) == ["/device:GPU:0"] * 2 + ["/device:GPU:1"] * 2
    assert {node.attr["communication_hint"].s for node in reductions} == {b"nccl" if kind == "nccl" else b"ring"}
    assert len({node.attr["instance_key"].i for node in reductions}) == 2


def ancestors(op):
    """The names of all operations that one waits for."""
    found, left = set(), [op]
    while left:
        op = left.pop()
        before = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        left += [each for each in before if each.name not in found]
        found |= {each.name for each in before}
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_nccl_begins_its_messages_in_one_order_on_all_devices(num_workers):
    """Two that wait for each other on two devices would wait for ever."""
    graph = graph_for_gpus(num_workers, all_reduce="nccl")
    found = [op for op in graph.get_operations() if op.type == "CollectiveReduce"]
    by_instance = {}
    for op in found:
        by_instance.setdefault(op.get_attr("instance_key"), []).append(op)
    groups = [by_instance[instance] for instance in sorted(by_instance)]
    assert len(groups) >= 2 and {len(group) for group in groups} == {2 // num_workers}
    for earlier, later in zip(groups, groups[1:], strict=False):
        for op in later:
            assert {each.name for each in earlier} <= ancestors(op)


@pytest.mark.parametrize("update", ["cpu", "mirrored"])
def test_the_ring_between_workers_carries_each_gradient_once_however_many_towers_they_have(update, cifar10_dir):
    """Besides, the loss and whether to stop. A ring of W sends 2 (W - 1)/W of what it carries."""
    config = Config(num_gpus=2, batch_size=2, device="cpu", variable_update=update)
    placed = dataclasses.replace(devices.place(config), num_workers=2, worker=1)
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    built = training.training_graph(cifar10.WORKLOAD, examples, config, placed)
    rings = [op for op in built.graph.get_operations() if op.type == "CollectiveReduce"]
    assert sum(op.inputs[0].shape.num_elements() for op in rings) == built.saved.num_parameters + 2
    assert len(rings) == 3  # local3/weights, all other gradients, and the two numbers
    assert {op.get_attr("group_size") for op in rings} == {2}


def test_nccl_without_gpus_is_refused():
    with pytest.raises(errors.ConfigError, match=r"--all_reduce=nccl is for GPUs, but .* /cpu:0, /cpu:1\. Use"):
        trainings.train(*make(), 1, variable_update="mirrored", all_reduce="nccl", num_gpus=2)


def test_checking_the_only_copy_is_refused():
    with pytest.raises(errors.ConfigError, match="--check_mirrors_every_steps=5: there is one copy"):
        trainings.train(*make(), 1, check_mirrors_every_steps=5, num_gpus=2)


def test_what_is_not_got_from_get_variable_is_refused():
    workload, examples = make()

    def network(features, training):
        if not v1.trainable_variables():
            network.scale = tf.Variable(1.0, name="scale", dtype=features.dtype)
        return workload.inference(features, training) * network.scale

    with pytest.raises(errors.GraphError, match="scale cannot be mirrored: .* --variable_update=cpu"):
        trainings.train(Workload("n", None, network), examples, 1, variable_update="mirrored", num_gpus=2)
