"""--variable_update=auto: what is chosen for which devices, what decides instead, and what is said."""

import jobs
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Config
from tower_train.graph import devices, training
from tower_train.graph.devices import Gpu
from tower_train.run import choices
from tower_train.run_dir import manifest
from tower_train.workload import DataRequest

v1 = tf.compat.v1
A100, FAKE = Gpu("A100", (8, 0)), Gpu("fake GPU")


def resolve(num_gpus, began_with=None, gpu=A100, **options):
    """(variable_update, all_reduce, lines)"""
    placed = devices.place(Config(num_gpus=num_gpus, **options), [gpu] * num_gpus if gpu else [])
    before = {"variable_update": began_with} if began_with else {}
    config, lines = choices.resolve(Config(num_gpus=num_gpus, **options), before, placed)
    return config.variable_update, config.all_reduce, lines


@pytest.mark.parametrize(
    ("num_gpus", "gpu", "expected"),
    [
        (1, None, ("cpu", None, [])),
        (8, None, ("cpu", None, [])),
        (1, A100, ("mirrored", None, ["variable_update: mirrored, on the GPUs"])),
        (
            8, A100,
            ("mirrored", "nccl", ["variable_update: mirrored, on the GPUs", "all_reduce: nccl, between 8 GPUs"]),
        ),
    ],
)  # fmt: skip
def test_towers_on_gpus_have_their_variables_there_and_others_on_the_host(num_gpus, gpu, expected):
    assert resolve(num_gpus, gpu=gpu) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(variable_update="cpu"), ("cpu", None)),
        (dict(variable_update="mirrored"), ("mirrored", "nccl")),
        (dict(variable_update="mirrored", all_reduce="add_n"), ("mirrored", "add_n")),
        (dict(all_reduce="collective"), ("mirrored", "collective")),
        (dict(check_mirrors_every_steps=5), ("mirrored", "nccl")),
        (dict(began_with="cpu"), ("cpu", None)),
        (dict(began_with="mirrored"), ("mirrored", "nccl")),
        (dict(began_with="cpu", all_reduce="nccl"), ("mirrored", "nccl")),
    ],
)  # fmt: skip
def test_what_is_asked_for_or_was_chosen_before_holds(options, expected):
    assert resolve(2, **options)[:2] == expected


@pytest.mark.parametrize(
    "options", [dict(all_reduce="add_n"), dict(check_mirrors_every_steps=5), dict(began_with="mirrored")]
)
def test_it_also_holds_for_towers_on_the_cpu(options):
    assert resolve(2, gpu=None, **options)[::2] == ("mirrored", [])


def test_without_nccl_it_is_the_ring_and_the_line_says_why():
    _, all_reduce, lines = resolve(2, gpu=FAKE)
    assert all_reduce == "collective" and lines[1].endswith("NVIDIA's GPUs, which fake GPU is not known to be")


def test_several_towers_on_one_gpu_average_by_the_ring():
    config = Config(num_gpus=2, variable_update="mirrored")
    placed = devices.place(config, [A100, A100])
    placed.session_config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[1024, 1024])
    config, lines = choices.resolve(config, {}, placed)
    assert config.all_reduce == "collective" and "several towers on one GPU" in lines[0]


def graph_on(num_gpus):
    config = Config(num_gpus=num_gpus, batch_size=2)
    placed = devices.place(config, [A100] * num_gpus)
    config, _ = choices.resolve(config, {}, placed)
    return training.training_graph(toy_workload.WORKLOAD, toy_workload.load(DataRequest("train")), config, placed).graph


def test_the_graph_for_several_gpus_averages_between_them():
    means = [op for op in graph_on(2).get_operations() if op.type == "CollectiveReduce"]
    assert {(op.device, op.get_attr("communication_hint")) for op in means} == {
        ("/device:GPU:0", b"nccl"), ("/device:GPU:1", b"nccl"),
    }  # fmt: skip


def test_the_graph_for_a_lone_gpu_has_its_weights_there():
    with graph_on(1).as_default():
        assert {variable.device for variable in v1.trainable_variables()} == {"/device:GPU:0"}


def test_a_resumed_run_goes_on_with_what_its_run_json_has(tmp_path):
    """All workers of a cluster must have it in common, too."""
    for options, expected in ((dict(variable_update="mirrored"), "mirrored"), ({}, "mirrored")):
        jobs.train_toy(tmp_path, max_steps=1, **options)
        run_json = jobs.read_json(tmp_path, "run.json")
        assert run_json["config"]["variable_update"] == expected
    assert {"--variable_update", "--all_reduce"} <= manifest.same_everywhere(run_json, toy_workload.WORKLOAD).keys()


def test_cards_of_different_models_are_announced_and_their_copies_compared():
    config, cards = Config(num_gpus=2), [Gpu("RTX 3090", (8, 6)), Gpu("RTX 4090", (8, 9))]
    mixed, notes = choices.resolve(config, {}, devices.place(config, cards))
    assert mixed.check_mirrors_every_steps == 100
    assert notes[-1].startswith("*** GPUs of different models (RTX 3090, RTX 4090): the slowest sets the pace")
    for options, gpus, every in (({}, cards[:1] * 2, 0), ({"check_mirrors_every_steps": 7}, cards, 7)):
        config = Config(num_gpus=2, **options)
        assert choices.resolve(config, {}, devices.place(config, gpus))[0].check_mirrors_every_steps == every
