"""Several towers on one GPU, which a program splits into logical devices before it trains."""

import json

import fake_gpus
import jobs
import pytest

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


def test_each_part_of_a_split_gpu_counts_as_a_gpu(tmp_path):
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
