"""The choice of devices: GPUs by number, workers that divide them, the CPU where it is asked for or there are none."""

import pytest
import tensorflow as tf

from tower_train import host
from tower_train.config import Config
from tower_train.errors import ConfigError
from tower_train.graph import devices


@pytest.mark.parametrize(
    ("options", "here", "local", "bound", "names", "towers"),
    [
        (dict(gpus=(2, 0)), 3, (0, 1), None, "2 0", "1 0"),  # as TensorFlow counts those that a process sees
        (dict(gpus=(1,)), 4, (1, 2), None, "1", "0"),  # --gpus says which
        (dict(num_gpus=2), 4, (1, 2), None, "2 3", "0 1"),  # workers of a machine divide its GPUs
        (dict(num_gpus=2), 2, (1, 2), "0,1", "0 1", "0 1"),  # each process was given two
        (dict(num_gpus=1), 2, (2, 3), None, "0", "0"),  # they take turns
        (dict(num_gpus=2), 4, (0, 1), None, "0 1", "0 1"),
    ],
)
def test_gpus_are_numbered_as_the_machine_does_and_as_tensorflow_does(
    options, here, local, bound, names, towers, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if bound:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", bound)
    placed = devices.place(Config(**options), [f"card {i}" for i in range(here)], local)
    assert placed.names == tuple(f"GPU {i} (card {i})" for i in names.split())
    assert placed.towers == tuple(f"/gpu:{i}" for i in towers.split())


@pytest.mark.parametrize(
    ("options", "here", "local", "text"),
    [
        (dict(num_gpus=3), "ab", (0, 1), r"^--num_gpus=3: .* GPUs are: 0 \(a\), 1 \(b\)\. .*--device=cpu"),
        (dict(gpus=(0, 2)), "ab", (0, 1), r"^--gpus=0,2: .* GPUs are: 0 \(a\), 1 \(b\)\. .*--device=cpu"),
        (dict(gpus=(0,)), "", (0, 1), r"^--gpus=0: this machine's GPUs are: none\. .*--device=cpu"),
        (dict(num_gpus=1, device="gpu"), "", (0, 1), r"^--num_gpus=1: this machine's GPUs are: none\. .*--device=cpu"),
        (dict(num_gpus=2), "ab", (1, 2), "2 workers .* ask for 2 GPUs each, and it has 2. Give --num_gpus=1"),
    ],
)
def test_gpus_that_are_not_there_are_refused_with_those_that_are(options, here, local, text, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=text):
        devices.place(Config(**options), list(here), local)


def test_a_driver_is_found_by_its_file_or_by_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "NVIDIA_DRIVER", str(tmp_path / "version"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert host.nvidia_driver() is None
    assert devices.place(Config(num_gpus=2)).towers == ("/cpu:0", "/cpu:1")
    program = tmp_path / "nvidia-smi"
    for answer, expected in (("No devices were found", None), ("GPU 0: NVIDIA H200", str(program))):
        program.write_text(f"#!/bin/sh\necho {answer}\n")
        program.chmod(0o755)
        assert host.nvidia_driver() == expected
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


@pytest.mark.parametrize(
    ("device", "hidden", "here"),
    [("cpu", None, None), ("auto", "-1", None), ("auto", "", None), ("auto", None, []), ("cpu", None, ["a", "b"])],
)
def test_towers_live_on_logical_cpu_devices_without_gpus_or_where_someone_says_so(
    device, hidden, here, monkeypatch, tmp_path
):
    a_driver(monkeypatch, tmp_path)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    placed = devices.place(Config(num_gpus=3, device=device), here)
    assert placed.towers == ("/cpu:0", "/cpu:1", "/cpu:2")
    assert dict(placed.session_config.device_count) == {"CPU": 3, "GPU": 0}


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0), None])
def test_a_card_that_is_newer_than_tensorflows_binaries_is_one_line_about_what_is_compiled(capability, monkeypatch):
    """Only of those that carry towers; the targets are the wheel's of TensorFlow 2.21."""
    build = {"cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    lines = devices.notes_on_new_models([devices.Gpu("some", capability)] * 2 + [devices.Gpu("A100", (8, 0))])
    if capability == (10, 0):
        assert len(lines) == 1 and f"no binaries for some (compute capability {capability[0]}.0)" in lines[0]
        assert "CUDA_CACHE_MAXSIZE=4294967296" in lines[0]
    else:
        assert lines == []
    assert devices.place(Config(gpus=(1,)), [devices.Gpu("new", (99, 0)), devices.Gpu("usual", (8, 0))]).notes == ()


def test_the_placement_log_reaches_the_session():
    for gpus_here in ([], ["a"]):
        assert devices.place(Config(log_device_placement=True), gpus_here).session_config.log_device_placement
