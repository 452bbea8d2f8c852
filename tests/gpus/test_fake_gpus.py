"""TensorFlow's own placer, partitioner and kernels on GPUs that hold memory but cannot compute (fake_gpu.cc)."""

import json
import pathlib
import shutil
import subprocess
import sys

import jobs
import pytest
import tensorflow as tf

COMPILER = shutil.which("g++")
CASES = {
    "cpu": {},
    "add_n": {"variable_update": "mirrored", "all_reduce": "add_n"},
    "nccl": {"variable_update": "mirrored", "all_reduce": "nccl", "optimizer": "adam"},
}
GRADIENT_BYTES = 4 * 1_068_298  # of the tutorial's network, one for each weight
INPUT_BYTES = 2 * 4 * (32 * 32 * 3 + 4)  # two towers' next images, as they are in the files, and labels


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Reads what on_fake_gpus says of each case."""
    if not COMPILER:
        pytest.skip("needs g++ to build GPUs")
    plugin = tmp_path_factory.mktemp("plugin") / "fake_gpu.so"
    source = pathlib.Path(__file__).with_name("fake_gpu.cc")
    options = ["-std=c++17", "-shared", "-fPIC", "-O1", f"-I{tf.sysconfig.get_include()}"]
    subprocess.run([COMPILER, *options, source, "-o", plugin], check=True)
    # A fresh process, since TensorFlow reads once which graphs to dump.
    words = [sys.executable, "-m", "on_fake_gpus", plugin, json.dumps(list(CASES.values()))]
    done = subprocess.run(words, env=jobs.environment(jobs.TESTS), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def test_every_operation_has_a_kernel_where_it_was_put(found):
    """Else there would be no executors, since soft placement is off."""
    assert list(found) == list(CASES)


def test_towers_live_on_the_gpus_that_were_asked_for_and_the_process_sees_no_other(found):
    """--gpus=2,0: TensorFlow numbers those that a process sees in the order of the machine's."""
    for case in found.values():
        assert case["towers"] == ["/gpu:1", "/gpu:0"]
        assert [name.partition(" (")[0] for name in case["names"]] == ["GPU 2", "GPU 0"]
        assert 'visible_device_list: "0,2"' in case["session"]


def test_sessions_and_eager_operations_agree_on_the_gpus_and_let_their_memory_grow(found):
    for case in found.values():
        assert case["session"] == case["context"]
        assert "allow_growth: true" in case["session"]


@pytest.mark.parametrize("name", ["add_n", "nccl"])
def test_only_scalars_and_booleans_go_to_the_host_in_a_step_of_mirrored_variables(found, name):
    assert found[name]["crossing"]["GPU to CPU"] < 64
    assert INPUT_BYTES <= found[name]["crossing"]["CPU to GPU"] < INPUT_BYTES + 128


def test_add_n_sends_each_gradient_to_the_other_gpu_and_its_mean_back(found):
    assert 2 * GRADIENT_BYTES <= found["add_n"]["crossing"]["GPU to GPU"] < 2 * GRADIENT_BYTES + 16


def test_variables_on_the_host_send_every_tower_its_weights_and_get_its_gradients(found):
    crossing = found["cpu"]["crossing"]
    assert 2 * GRADIENT_BYTES <= crossing["GPU to CPU"] < 2 * GRADIENT_BYTES + 64
    sent = 2 * GRADIENT_BYTES + INPUT_BYTES
    assert sent <= crossing["CPU to GPU"] < sent + 128
    assert "GPU to GPU" not in crossing
