"""Places: variables and their update on the CPU, tower i on GPU i. Read from a graph; no GPU is needed."""

import re

import pytest
import tensorflow as tf

import cifar10
from tower_train import host
from tower_train.config import Config
from tower_train.errors import ConfigError
from tower_train.graph import devices, training
from tower_train.workload import DataRequest

NUM_GPUS = 4
HOST = "/device:CPU:0"


@pytest.fixture(scope="module")
def training_nodes(cifar10_dir):
    """All nodes of the training graph for four GPUs: those of the graph and those of its functions (the update)."""
    examples = cifar10.WORKLOAD.examples(DataRequest("train", "cifar10", str(cifar10_dir)))
    config = Config(num_gpus=NUM_GPUS, batch_size=2, optimizer="momentum")
    placed = devices.place(config, gpus_here=[f"card {i}" for i in range(NUM_GPUS)])
    definition = training.training_graph(cifar10.WORKLOAD, examples, config, placed).graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def nodes_of(nodes, *ops):
    return [node for node in nodes if node.op in ops]


def test_every_variable_is_on_the_host(training_nodes):
    """Weights, momentum, moving averages and counters; the next batches' images and labels wait on the GPUs."""
    variables = nodes_of(training_nodes, "VarHandleOp", "VariableV2")
    waiting = [node for node in variables if node.name.startswith("input/staged/part_")]
    assert sorted(node.device for node in waiting) == [f"/device:GPU:{i}" for i in range(NUM_GPUS) for _ in range(2)]
    others = [node for node in variables if node not in waiting]
    assert len(others) == 3 * 10 + 2 + 1  # and the position of these batches
    assert {node.device for node in others} == {HOST}


def test_every_update_of_a_variable_is_on_the_host(training_nodes):
    momentum = nodes_of(training_nodes, "ResourceApplyMomentum")
    averages = nodes_of(training_nodes, "AssignSubVariableOp")
    counters = nodes_of(training_nodes, "AssignAddVariableOp")
    assert [len(momentum), len(averages), len(counters)] == [10, 10, 2]
    waiting = {node.name for node in training_nodes if node.name.startswith("input/staged/part_")}
    updates = [node for node in training_nodes if re.search("Assign|Apply|Scatter", node.op)
               and not waiting.intersection(node.input)]  # fmt: skip
    assert {node.device for node in updates} == {HOST}


def test_all_of_a_towers_arithmetic_is_on_its_gpu(training_nodes):
    """But for summaries, whose operations have no kernels there."""
    arithmetic = re.compile(r"tower_[0-9]+/(?!preprocess/|.*/(?:activations|sparsity)\b)")
    of_towers = [node for node in training_nodes if arithmetic.match(node.name) and node.op != "ReadVariableOp"]
    assert len(of_towers) > 100 * NUM_GPUS
    for node in of_towers:
        assert node.device == f"/device:GPU:{node.name.split('/')[0].removeprefix('tower_')}", node.name


def test_chosen_gpus_are_counted_in_the_order_of_the_machines():
    """As TensorFlow counts those that a process sees; tests/gpus/test_fake_gpus.py asks TensorFlow."""
    placed = devices.place(Config(gpus=(2, 0)), gpus_here=["a", "b", "c"])
    assert placed.towers == ("/gpu:1", "/gpu:0")
    assert placed.names == ("GPU 2 (c)", "GPU 0 (a)")


@pytest.mark.parametrize(
    ("here", "local", "count", "bound", "expected"),
    [
        (4, (1, 2), 2, None, ("GPU 2 (2)", "GPU 3 (3)")),
        (8, (2, 3), 1, None, ("GPU 2 (2)",)),
        (2, (1, 2), 2, "0,1", ("GPU 0 (0)", "GPU 1 (1)")),  # each process was given two
        (2, (2, 3), 1, None, ("GPU 0 (0)",)),  # they take turns
        (4, (0, 1), 2, None, ("GPU 0 (0)", "GPU 1 (1)")),
    ],
)
def test_workers_of_a_machine_divide_its_gpus(here, local, count, bound, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", bound) if bound else monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    )
    cards = [str(i) for i in range(here)]
    assert devices.place(Config(num_gpus=count), cards, local).names == expected
    taken = devices.place(Config(gpus=(1,)), cards, local)
    assert taken.names == ("GPU 1 (1)",), "--gpus says which"


def test_workers_that_ask_for_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="2 workers of this machine ask for 2 GPUs each, and it has 3. Give --num_gp"):
        devices.place(Config(num_gpus=2), ["a", "b", "c"], (1, 2))


def test_a_driver_is_found_by_its_file_by_those_of_wsl_or_by_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "NVIDIA_DRIVER", str(tmp_path / "version"))
    monkeypatch.setattr(host, "WSL_DRIVER", (str(tmp_path / "dxg"), str(tmp_path / "libcuda")))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert host.nvidia_driver() is None
    program = tmp_path / "nvidia-smi"
    for answer, expected in (("No devices were found", None), ("GPU 0: NVIDIA H200", str(program))):
        program.write_text(f"#!/bin/sh\necho {answer}\n")
        program.chmod(0o755)
        assert host.nvidia_driver() == expected
    (tmp_path / "dxg").touch()
    assert host.nvidia_driver() == str(program), "other makers' GPUs have that too"
    (tmp_path / "libcuda").touch()
    assert host.nvidia_driver() == str(tmp_path / "libcuda")
    (tmp_path / "version").touch()
    assert host.nvidia_driver() == str(tmp_path / "version")


def a_driver(monkeypatch, tmp_path):
    """Makes this machine one with an NVIDIA driver, whose GPUs TensorFlow may use."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version")
    monkeypatch.setattr(host, "NVIDIA_DRIVER", str(driver))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_without_a_gpu_that_tensorflow_can_use_is_refused(monkeypatch, tmp_path):
    """Else training would go on silently on the CPU."""
    a_driver(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"NVIDIA driver.*pip install 'tower_train\[gpu\]'.*--device=cpu"):
        devices.place(Config(num_gpus=2))


@pytest.mark.parametrize(("device", "hidden"), [("cpu", None), ("auto", "-1"), ("auto", "")])
def test_with_a_driver_the_cpu_is_used_where_someone_says_so(monkeypatch, tmp_path, device, hidden):
    a_driver(monkeypatch, tmp_path)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices.place(Config(num_gpus=2, device=device)).towers == ("/cpu:0", "/cpu:1")


@pytest.mark.parametrize(("device", "gpus_here"), [("auto", []), ("cpu", []), ("cpu", ["a", "b"])])
def test_without_gpus_towers_live_on_logical_cpu_devices(device, gpus_here):
    placed = devices.place(Config(num_gpus=3, device=device), gpus_here)
    assert placed.towers == ("/cpu:0", "/cpu:1", "/cpu:2")
    assert dict(placed.session_config.device_count) == {"CPU": 3, "GPU": 0}


@pytest.mark.parametrize(
    ("config", "gpus_here", "asked", "there"),
    [
        (Config(num_gpus=3), ["a", "b"], "--num_gpus=3", "0 (a), 1 (b)"),
        (Config(gpus=(0, 2)), ["a", "b"], "--gpus=0,2", "0 (a), 1 (b)"),
        (Config(gpus=(0,)), [], "--gpus=0", "none"),
        (Config(num_gpus=1, device="gpu"), [], "--num_gpus=1", "none"),
    ],
)
def test_gpus_that_are_not_there_are_refused_with_a_list_of_those_that_are(config, gpus_here, asked, there):
    with pytest.raises(ConfigError) as error:
        devices.place(config, gpus_here)
    assert str(error.value).startswith(f"{asked}: this machine's GPUs are: {there}. ")
    assert "--device=cpu" in str(error.value)


@pytest.mark.parametrize("capability", [(6, 0), (7, 5), (9, 0), (10, 0), (12, 0), None])
def test_a_card_that_is_newer_than_tensorflows_binaries_is_one_line_about_what_is_compiled(capability, monkeypatch):
    """Only of those that carry towers; the targets are the wheel's of TensorFlow 2.21."""
    build = {"cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    lines = devices.compile_notes([devices.Gpu("some", capability)] * 2 + [devices.Gpu("A100", (8, 0))])
    if capability in [(10, 0), (12, 0)]:
        assert len(lines) == 1 and f"no binaries for some (compute capability {capability[0]}.0)" in lines[0]
        assert "CUDA_CACHE_MAXSIZE=4294967296" in lines[0]
    else:
        assert lines == []
    assert devices.place(Config(gpus=(1,)), [devices.Gpu("new", (99, 0)), devices.Gpu("usual", (8, 0))]).notes == ()


def test_the_placement_log_reaches_the_session():
    for gpus_here in ([], ["a"]):
        assert devices.place(Config(log_device_placement=True), gpus_here).session_config.log_device_placement
