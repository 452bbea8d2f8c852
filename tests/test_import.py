"""`import tower_train`, in a program that has set up TensorFlow, logging and flags for itself."""

import pathlib
import re
import subprocess
import sys

import jobs
import pytest

import tower_train

STATE = """
import gc, logging, os, sys, warnings
from absl import flags
from absl import logging as absl_logging

BEFORE = sys.argv[1]
if BEFORE == "tensorflow":
    import tensorflow as tf

    first, *others = tf.config.list_physical_devices("CPU")
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(first, [tf.config.LogicalDeviceConfiguration()] * 3)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")
gc.disable()
logging.basicConfig(level=logging.DEBUG, format="mine %(message)s")
logging.getLogger("tower_train").setLevel("WARNING")
absl_logging.set_verbosity(absl_logging.ERROR)
flags.DEFINE_string("workload", "a flag that the trainer has too", "")
warnings.simplefilter("error", UserWarning)


def state():
    loggers = [logging.getLogger(name) for name in ("", "absl", "tensorflow")]
    known = [(each.level, list(each.handlers), list(each.filters)) for each in loggers]
    known.append(logging.getLogger("tower_train").level)
    known += [absl_logging.get_verbosity(), flags.FLAGS.is_parsed(), gc.isenabled()]
    known.append([each for each in warnings.filters if each[2] is UserWarning])
    known.append(os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
    if BEFORE == "tensorflow":
        known += [sorted(flags.FLAGS), tf.config.get_visible_devices(), tf.executing_eagerly()]
        known.append(tf.config.get_logical_device_configuration(first))
        known.append(tf.config.threading.get_intra_op_parallelism_threads())
        known.append(dict(os.environ))
    return known


before = state()
import tower_train

if BEFORE == "tensorflow":
    for name in tower_train.__all__:
        name == "estimator" or getattr(tower_train, name)
    assert not {"tf_keras", "tensorflow_estimator"} & {*sys.modules}, "packages that the estimator alone needs"
    tower_train.estimator
assert state() == before, (before, state())
if BEFORE == "tensorflow":
    assert len(tf.config.list_logical_devices("CPU")) == 3
assert flags.FLAGS(["program", "--workload=mine"]) == ["program"] and flags.FLAGS.workload == "mine"
"""


@pytest.mark.parametrize("before", ["tensorflow", "nothing"])
def test_an_import_leaves_devices_logging_and_flags_as_they_were(before):
    if before == "tensorflow":
        done = jobs.command("-c", STATE, before)
    else:
        done = subprocess.run([sys.executable, "-c", STATE, before], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_every_public_name():
    stub = pathlib.Path(tower_train.__file__).with_suffix(".pyi").read_text()
    assert not re.findall(r"^from .* import (\w+)\b(?! as \1$)", stub, re.M), "a name without `as` is not exported"
    assert {"train", "Config", "layers", "multi_gpu_model"} < {*dir(tower_train)}
