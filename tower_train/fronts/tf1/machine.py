"""Sessions of TensorFlow 1's programs on this machine: queues on the host, GPUs that are not there, workers."""

import functools
import importlib
import re
import sys

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import device_attributes_pb2
from tensorflow.python.client import device_lib, session
from tensorflow.python.framework import ops
from tensorflow.python.ops import variable_scope

from tower_train import console
from tower_train.cluster import program
from tower_train.fronts.tf_estimator.workers import merged

v1 = tf.compat.v1
_ON_HOST = re.compile(r"Queue|Reader(?!Dataset)|Barrier")  # operations with kernels of the CPU only, and their handles
_OF_NUMPY = {"int": int, "float": float, "object": object, "str": str, "product": np.prod, "float_": np.float64,
             "asscalar": lambda array: array.item(), "alltrue": np.all, "in1d": np.isin}  # fmt: skip

_MOVED = {  # names of TensorFlow's modules that tf-slim looks for there
    "framework.ops": ("IndexedSlices", "Tensor"), "ops.array_ops": ("stack", "unstack"),
    "ops.control_flow_ops": ("Assert", "case", "cond", "while_loop"),
}  # fmt: skip


def prepare(num_shown_gpus: int) -> None:
    """Prepares this process for a program; num_shown_gpus: GPUs that it is told of where there is none."""
    keep_queues_on_host()
    _open_sessions()
    if num_shown_gpus:
        _show_gpus(num_shown_gpus)
    for name in ("legacy_tf_layers", "legacy_tf_layers.normalization"):  # where TensorFlow 2.21 looks in vain
        sys.modules[f"tf_keras.{name}"] = importlib.import_module(f"tf_keras.src.{name}")
    for module, moved in _MOVED.items():
        home = importlib.import_module(f"tensorflow.python.{module}")
        for name in moved:
            if not hasattr(home, name):
                setattr(home, name, getattr(v1, name))
    variable_scope.variable = v1.Variable
    for name, value in _OF_NUMPY.items():  # that numpy has dropped since
        if name not in vars(np):
            setattr(np, name, value)


def _has_gpus() -> bool:
    """To be asked late: a program may set CUDA_VISIBLE_DEVICES first."""
    return bool(tf.config.list_physical_devices("GPU"))


def keep_queues_on_host() -> None:
    """Places queues and readers on the CPU whatever tf.device says, as TensorFlow 1 did; today it refuses the graph."""
    apply = ops.Graph._apply_device_functions

    @functools.wraps(apply)
    def apply_and_correct(graph, op):
        apply(graph, op)
        spec = tf.DeviceSpec.from_string(op.device) if _ON_HOST.search(op.type) else None
        if spec and spec.device_type:  # CPU too: a queue in /gpu:1 asks for /cpu:1
            op._set_device(spec.replace(device_type="CPU", device_index=0).to_string())

    ops.Graph._apply_device_functions = apply_and_correct


def _open_sessions() -> None:
    """Lets sessions open among Horovod's workers, and run on the CPU what is placed on GPUs where there are none."""
    initialize = session.BaseSession.__init__

    @functools.wraps(initialize)
    def opened(self, target="", graph=None, config=None):
        config = config or v1.ConfigProto()
        if program.is_initialized():
            target, config = target or program.current().target, merged(program.current().session_config, config)
        if not _has_gpus():
            config.allow_soft_placement = True
            _tell_of_cpu(graph or ops.get_default_graph())
        initialize(self, target, graph, config)

    session.BaseSession.__init__ = opened


def _tell_of_cpu(graph: tf.Graph) -> None:
    if any("GPU" in op.device.upper() for op in graph.get_operations()):
        _tell_once("There is no GPU here: what this program places on GPUs runs on the CPU.")


_tell_once = functools.cache(console.notice)


def _show_gpus(count: int) -> None:
    """Adds GPUs to the devices that programs ask TensorFlow for."""
    listed = device_lib.list_local_devices

    def list_local_devices(session_config=None):
        if _has_gpus():
            return listed(session_config)
        made = [
            device_attributes_pb2.DeviceAttributes(name=f"/device:GPU:{i}", device_type="GPU") for i in range(count)
        ]
        return [*listed(session_config), *made]

    device_lib.list_local_devices = list_local_devices
