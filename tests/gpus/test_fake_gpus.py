"""TensorFlow's own placer, partitioner and kernels on GPUs that hold memory but cannot compute (fake_gpu.cc)."""

import json
import subprocess
import sys

import fake_gpus
import jobs
import pytest
import tensorflow as tf
import trainings

import cifar10
from tower_train import layers
from tower_train.workload import DataRequest


def looked_at(folder):
    """{case: what fake_gpus.audit says of it}."""
    (folder / "dumps").mkdir()
    dumps = dict(FAKE_GPUS="4", TF_CPP_VMODULE="placer=3", TF_DUMP_GRAPH_PREFIX=f"{folder}/dumps")
    dumps |= dict(TF_XLA_FLAGS="--tf_xla_clustering_debug=true")
    # A fresh process, since TensorFlow reads once which graphs to dump.
    words = [sys.executable, "-m", "fake_gpus", fake_gpus.build(folder)]
    done = subprocess.run(words, env=jobs.environment(jobs.TESTS) | dumps, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(not fake_gpus.COMPILER, reason=fake_gpus.WITHOUT)
def test_graphs_of_all_kinds_on_gpus(tmp_path):
    """One test, as several in processes of their own would wait for one audit."""
    found = looked_at(tmp_path)
    for name, case in found.items():
        has_kernels_where_it_is_placed(name, case)
        is_on_the_wanted_gpus(name, case)
    has_few_programs_of_xlas(found)
    for front in ("keras", "estimator"):
        sends_no_more_than_an_all_reduce(found[f"{front} alone"], found[front])


def has_kernels_where_it_is_placed(name, case):
    """Every operation on a GPU has a kernel there, and executors need no soft placement."""
    assert case["on_gpus"] > 100, name
    assert (case["through_host"], case["refused"]) == ([], None), name
    assert "keras" in name or "estimator" in name or not case["transposes"], name


def is_on_the_wanted_gpus(name, case):
    """--gpus=2,0, in and outside of sessions, with memory that grows: TensorFlow numbers those that a process sees in
    the order of the machine's."""
    assert case["towers"] == ["/gpu:1", "/gpu:0"] or "alone" in name, name
    assert case["session"] == case["context"], name
    assert 'visible_device_list: "0,2"' in case["session"] and "allow_growth: true" in case["session"]


def has_few_programs_of_xlas(found):
    """Of a trainer's step: the input, the towers' passes with the check, the update, the averages; two more for each
    batch normalisation over the towers, whose collectives cut a tower's passes. Of Keras' step alone: all but what
    draws, which cuts it. Of its towers also the joined rows cut it, and the updates on a GPU are one."""
    cut = {"convnet": 2, "image_folder": 8, "resnet8": 34, "cifar10_94": 13, "keras alone": 3, "keras": 12}
    for name, most in cut.items():
        for gpu, sizes in found[name]["clusters"].items():
            assert len(sizes) <= most and sizes[0] > 50, (name, gpu, sizes)
        assert len(found[name]["clusters"]) == (1 if "alone" in name else 2), name


def sends_no_more_than_an_all_reduce(alone, several):
    """Weights stay on a lone GPU. Beside batches, statistics and losses, which are small here."""
    assert 0 < sum(alone["sent"].values()) < 0.1 * alone["weights"]
    of_all_reduce = 2 * (len(several["towers"]) - 1) * several["weights"]
    assert sum(several["sent"].values()) < 1.1 * of_all_reduce
    for direction in ("GPU:0 GPU:1", "GPU:1 GPU:0"):  # both, as each has about half of the weights
        assert several["sent"][direction] > 0.9 * of_all_reduce / 2


# TensorFlow's plugins cannot be split, CUDA's GPUs can: what is compared is what TensorFlow is asked for.
PROGRAM = """
import json, os, sys
os.environ["FAKE_GPUS"] = "3"
import tensorflow as tf
from tensorflow.python.framework import load_library
load_library.load_pluggable_device_library(sys.argv[1])
parts = [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes) for megabytes in (700, 300)]
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[1], parts)
from tower_train import Config, errors
from tower_train.graph import devices
placed = devices.place(Config(gpus=(3, 1, 2)))
options = placed.session_config.gpu_options
limits = [list(each.memory_limit_mb) for each in options.experimental.virtual_devices]
tf.config.list_logical_devices()  # begins with them
refused = []
for wanted in (dict(num_gpus=5), dict(gpus=(1, 0))):
    try:
        devices.place(Config(**wanted))
    except errors.ConfigError as error:
        refused.append(str(error))
print(json.dumps([placed.towers, options.visible_device_list, limits, refused]))
sys.stdout.flush()
os._exit(0)
"""


def test_each_part_of_a_gpu_that_the_program_splits_counts_as_a_gpu(tmp_path):
    """GPU 1 of three is split in two: the parts are 1 and 2, the last GPU is 3, and 0 stays hidden."""
    plugin = fake_gpus.build(tmp_path) or pytest.skip(fake_gpus.WITHOUT)
    done = jobs.command("-c", PROGRAM, str(plugin))
    assert done.returncode == 0, done.stderr[-2000:]
    towers, visible, limits, refused = json.loads(done.stdout)
    assert towers == ["/gpu:2", "/gpu:0", "/gpu:1"]
    assert visible == "1,2"
    assert limits == [[700, 300], []]
    assert refused[0].startswith("--num_gpus=5: this machine's GPUs are: 0 (FAKE), 1 (FAKE), 2 (FAKE), 3 (FAKE). ")
    assert "GPU 0 cannot be used: in this process TensorFlow already began with GPU 1, 2, 3. " in refused[1]


def workload_and_examples(model):
    workload = cifar10.WORKLOAD.with_options({"model": model})
    return workload, workload.examples(DataRequest("train", "generated"))


def test_what_a_gpu_computes_is_what_a_cpu_computes(monkeypatch):
    """The tutorial's losses and variables, in float64; the form for GPUs runs on the CPU here. Of cifar10_94,
    tests/cifar10/test_cifar10_94.py holds both forms against a third one."""
    what = (*workload_and_examples("convnet"), 2)
    options = dict(dtype="float64", global_batch_size=2, num_gpus=1, learning_rate=0.01)
    on_cpu = trainings.train(*what, **options)
    monkeypatch.setattr(layers, "on_gpu", lambda: True)
    trainings.assert_same(trainings.train(*what, **options), on_cpu)


def test_a_layer_is_told_where_it_computes():
    with tf.Graph().as_default():
        for device, expected in (("/cpu:0", False), ("/gpu:1", True), ("/job:worker/task:1/gpu:0", True)):
            with tf.device(device):
                assert layers.on_gpu() == expected
