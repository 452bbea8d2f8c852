"""--variable_update=auto: what is chosen for how many GPUs and parameters, what decides instead, and what is said."""

import jobs
import norm_workload
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Config, Workload, errors
from tower_train.graph import devices, training
from tower_train.graph.gpus import Gpu
from tower_train.run import variable_update
from tower_train.run.variable_update import Network
from tower_train.run_dir import manifest
from tower_train.workload import DataRequest

v1 = tf.compat.v1
A100, FAKE = Gpu("A100", (8, 0)), Gpu("fake GPU")


def resolve(num_gpus, network=None, began_with=None, gpu=A100, **options):
    """(variable_update, all_reduce, lines); looking at the network fails if none is given."""
    config = Config(num_gpus=num_gpus, **options)
    placed = devices.place(config, [gpu] * num_gpus if gpu else [])
    config, lines = variable_update.resolve(config, began_with, placed, lambda: network or pytest.fail("looked"))
    return config.variable_update, config.all_reduce, lines


@pytest.mark.parametrize(
    ("num_gpus", "parameters", "expected"),
    [
        # By hand: 4 P / 16e9 x 2 + (N + 1) 4 P / 50e9 against 1e-4 + 2 (N - 1) / N x 4 P / 16e9 seconds.
        (2, 204_000, "cpu"), (2, 204_200, "mirrored"), (8, 127_700, "cpu"), (8, 127_900, "mirrored"),
        (2, 1, "cpu"), (8, 138_357_544, "mirrored"),
    ],
)  # fmt: skip
def test_the_size_of_the_network_decides_between_several_gpus(num_gpus, parameters, expected):
    update, all_reduce, lines = resolve(num_gpus, Network(parameters))
    assert (update, all_reduce) == (expected, "nccl" if expected == "mirrored" else None)
    assert lines[0].startswith(f"variable_update: {expected}, since {parameters:,} parameters (")
    assert f" MB), {num_gpus} GPUs: weights and gradients take" in lines[0]
    assert lines[1:] == ([f"all_reduce: nccl, between {num_gpus} GPUs"] if all_reduce else [])


def test_the_line_has_the_numbers():
    """4 MB: 2 x 0.25 ms over the links and 9 x 0.08 ms in the CPU's memory, against 0.1 ms and 1.75 x 0.25 ms."""
    [line, _] = resolve(8, Network(1_000_000))[2]
    assert "1,000,000 parameters (4.0 MB), 8 GPUs" in line and "1.22 ms a step by way of the CPU" in line
    assert "0.54 ms between the GPUs" in line


@pytest.mark.parametrize(("num_gpus", "gpu"), [(1, A100), (1, None), (8, None)])
def test_one_gpu_and_towers_on_the_cpu_need_no_look_and_no_line(num_gpus, gpu):
    assert resolve(num_gpus, gpu=gpu) == ("cpu", None, [])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(variable_update="cpu"), ("cpu", None)),
        (dict(variable_update="mirrored"), ("mirrored", "nccl")),
        (dict(variable_update="mirrored", all_reduce="add_n"), ("mirrored", "add_n")),
        (dict(all_reduce="collective"), ("mirrored", "collective")),
        (dict(check_mirrors_every_steps=5), ("mirrored", "nccl")),
        (dict(all_reduce_dtype="bfloat16"), ("mirrored", "collective")),
        (dict(began_with="cpu"), ("cpu", None)),
        (dict(began_with="mirrored"), ("mirrored", "nccl")),
        (dict(began_with="cpu", all_reduce="nccl"), ("mirrored", "nccl")),
    ],
)  # fmt: skip
def test_what_is_given_or_was_chosen_before_holds_without_a_look(options, expected):
    assert resolve(2, **options)[:2] == expected


@pytest.mark.parametrize("options", [dict(all_reduce="add_n"), dict(check_mirrors_every_steps=5)])
def test_it_also_holds_for_towers_on_the_cpu(options):
    assert resolve(2, gpu=None, **options)[0] == "mirrored"


def test_without_nccl_it_is_the_ring_and_the_line_says_why():
    _, all_reduce, lines = resolve(2, Network(10**8), gpu=FAKE)
    assert all_reduce == "collective" and lines[1].endswith("NVIDIA's GPUs, which fake GPU is not known to be")
    _, all_reduce, lines = resolve(2, all_reduce_dtype="bfloat16")
    assert all_reduce == "collective" and lines[1].endswith("since TensorFlow's NCCL does not send bfloat16")


def test_several_towers_on_one_gpu_average_by_the_ring():
    config = Config(num_gpus=2, variable_update="mirrored")
    placed = devices.place(config, [A100, A100])
    placed.session_config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[1024, 1024])
    config, lines = variable_update.resolve(config, None, placed, pytest.fail)
    assert config.all_reduce == "collective" and "several towers on one GPU" in lines[0]


def unnamed(features, training):
    if not v1.trainable_variables():
        unnamed.scale = tf.Variable(1.0, name="scale", dtype=features.dtype)
    return norm_workload.network(features, training) * unnamed.scale


def with_a_loss(features, training):
    outputs = norm_workload.network(features, training)
    v1.add_to_collection(v1.GraphKeys.REGULARIZATION_LOSSES, tf.reduce_sum(outputs))
    return outputs


@pytest.mark.parametrize(
    ("inference", "extra", "obstacle"),
    [
        (norm_workload.network, 0, None),
        (unnamed, 1, "tower_0/scale cannot be mirrored: the network did not get it from tf.compat.v1.get_variable"),
        (with_a_loss, 0, "There are 2 regularization losses, but 1 variables with a regularizer="),
    ],
    ids=["usual", "unnamed", "loss"],
)
def test_a_network_is_counted_and_what_keeps_it_from_being_mirrored_is_found(inference, extra, obstacle):
    """Kernel, embedding and softmax, gamma and beta."""
    workload, examples = Workload("n", None, inference), norm_workload.load(None)
    found = variable_update.look_at(workload, examples, Config(batch_size=4, dtype="float64"))
    assert found == Network(4 * 6 + 5 * 6 + 6 * 3 + 2 * 6 + extra, obstacle)
    update, _, [line] = resolve(2, found)
    assert update == "cpu" and (obstacle is None or f"since {obstacle} (" in line)


def test_a_network_that_breaks_a_rule_is_refused_as_it_is_otherwise():
    workload = Workload("n", None, norm_workload.network, loss=lambda outputs, labels: outputs)
    with pytest.raises(errors.GraphError, match="it must be a scalar"):
        variable_update.look_at(workload, norm_workload.load(None), Config(batch_size=4))


def test_the_graph_for_several_gpus_has_what_was_chosen():
    config = Config(num_gpus=2, batch_size=2)
    placed = devices.place(config, [A100, A100])
    config, _ = variable_update.resolve(config, None, placed, lambda: Network(10**8))
    graph = training.training_graph(
        toy_workload.WORKLOAD, toy_workload.load(DataRequest("train")), config, placed
    ).graph
    means = [op for op in graph.get_operations() if op.type == "CollectiveReduce"]
    assert {(op.device, op.get_attr("communication_hint")) for op in means} == {
        ("/device:GPU:0", b"nccl"), ("/device:GPU:1", b"nccl"),
    }  # fmt: skip


def test_a_resumed_run_goes_on_with_what_its_run_json_has(tmp_path):
    """All workers of a cluster must have it in common, too."""
    for options, expected in ((dict(variable_update="mirrored"), "mirrored"), ({}, "mirrored")):
        jobs.train_toy(tmp_path, max_steps=1, **options)
        run_json = jobs.read_json(tmp_path, "run.json")
        assert run_json["config"]["variable_update"] == expected
    assert {"--variable_update", "--all_reduce"} <= manifest.same_everywhere(run_json, toy_workload.WORKLOAD).keys()
