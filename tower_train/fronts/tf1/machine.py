"""This machine as a program of TensorFlow 1 finds it: queues on the host, GPUs that are not there, workers."""

import functools

import numpy as np
import tensorflow as tf

from tower_train import console
from tower_train.cluster import program
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator.workers import merged

_OF_NUMPY = {  # names that it dropped
    "int": int, "float": float, "complex": complex, "object": object, "str": str, "unicode": str, "float_": np.float64,
    "complex_": np.complex128, "string_": np.bytes_, "unicode_": np.str_, "Inf": np.inf, "infty": np.inf, "NaN": np.nan,
    "product": np.prod, "cumproduct": np.cumprod, "alltrue": np.all, "sometrue": np.any, "in1d": np.isin,
    "asscalar": lambda array: array.item(),
}  # fmt: skip
_tell_once = functools.cache(console.notice)


def prepare(num_shown_gpus: int) -> None:
    """Prepares this process for a program; num_shown_gpus: GPUs that it is told of where there is none."""
    compat.keep_queues_on_host()
    compat.open_sessions_by(_configuration)
    if num_shown_gpus:
        compat.show_gpus(num_shown_gpus)
    for name, value in _OF_NUMPY.items():
        vars(np).setdefault(name, value)


def _configuration(target: str, graph: tf.Graph, config) -> tuple:
    """Lets a session open among Horovod's workers, and run on the CPU what is placed on GPUs where there are none."""
    config = config or tf.compat.v1.ConfigProto()
    if program.is_initialized():
        target, config = target or program.current().target, merged(program.current().session_config, config)
    if not tf.config.list_physical_devices("GPU"):  # asked late: a program may set CUDA_VISIBLE_DEVICES first
        config.allow_soft_placement = True
        if any("GPU" in op.device.upper() for op in graph.get_operations()):
            _tell_once("There is no GPU here: what this program places on GPUs runs on the CPU.")
    return target, config
