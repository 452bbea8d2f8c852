# ruff: noqa: F401 - what is imported here is for the modules beside
"""The library tensorflow-estimator on today's TensorFlow: stand-ins for what TensorFlow has dropped, and private names.

Importing this module imports the library. setup.py names its version, which is its last: its private names stay.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.util import deprecation, tf_export
from tf_keras.api._v1 import keras as keras_v1
from tf_keras.api._v2 import keras as keras_v2
from tf_keras.src import backend_config
from tf_keras.src.mixed_precision import policy

from tower_train import errors
from tower_train.fronts import compat

v1 = tf.compat.v1


def _init_run_config(config, tf_config: dict) -> None:
    """Stands for TensorFlow's function that set up a RunConfig with strategies."""
    config._distribute_coordinator_mode, asked = None, config._experimental_distribute
    if getattr(asked, "remote_cluster", None):
        raise errors.ConfigError(
            "RunConfig: experimental_distribute has a remote_cluster. A program does not train on servers: start it on "
            "each worker, with TF_CONFIG there."
        )
    for name in ("train_distribute", "eval_distribute"):
        strategy = getattr(asked, name, None)
        if strategy is not None and getattr(config, name) is not None:
            raise errors.ConfigError(f"RunConfig: {name} and experimental_distribute's {name} say the same. Give one.")
        setattr(config, f"_{name}", strategy or getattr(config, name))
    config._init_distributed_setting_from_environment_var(tf_config)
    config._maybe_overwrite_session_config_for_distributed_training()


def _put_in_place() -> None:
    """Gives TensorFlow the modules and names without which the library cannot be imported."""

    def any_class(name: str) -> type:  # of the tables of a TPU
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    absent = {
        "distribute.estimator_training": {
            "init_run_config": _init_run_config,
            "should_run_distribute_coordinator": lambda config: False,
        },
        "tpu.tpu_embedding": {"__getattr__": any_class},
        "tpu.tpu_embedding_gradient": {},
        "tpu.session_support": {},
    }
    for name, values in absent.items():
        module = types.ModuleType(f"tensorflow.python.{name}")
        vars(module).update(values)
        sys.modules[module.__name__] = module
    tf_export.ESTIMATOR_API_NAME = name = "estimator"
    for table, version in ((tf_export.API_ATTRS, ""), (tf_export.API_ATTRS_V1, "_v1")):
        attributes = type(table[tf_export.TENSORFLOW_API_NAME])
        table[name] = attributes(f"_estimator_api_names{version}", f"_estimator_api_constants{version}")


class _Changed(types.ModuleType):
    """A module with other values of some names."""

    def __init__(self, module: types.ModuleType, **values):
        super().__init__(module.__name__)
        vars(self).update(values, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


@contextlib.contextmanager
def _keras_2() -> Iterator[None]:
    """Gives modules that are imported within this block a tensorflow with Keras 2 and tf.layers, from tf_keras."""
    layers, original = keras_v1.__internal__.legacy.layers, sys.modules["tensorflow"]
    versions = {"v1": _Changed(v1, keras=keras_v1, layers=layers), "v2": _Changed(tf.compat.v2, keras=keras_v2)}
    sys.modules["tensorflow"] = _Changed(tf, keras=keras_v2, compat=_Changed(tf.compat, **versions))
    try:
        yield
    finally:
        sys.modules["tensorflow"] = original


compat.check_restored_shapes()
compat.let_threads_have_floatx(backend_config)
compat.let_float32_be_floatx(policy.Policy)
_put_in_place()
with compat.replaced(deprecation, "deprecated", lambda *_, **__: lambda function: function), _keras_2():
    from tensorflow_estimator._api.v1 import estimator as api
    from tensorflow_estimator.python.estimator import (
        estimator,
        keras_lib,
        run_config,
        training,
        util,
    )
    from tensorflow_estimator.python.estimator.canned import optimizers


def is_summed(fn: Callable) -> bool:
    """Returns whether a model_fn is a canned one, and the last loss in the default graph a sum over the batch."""
    reduction = v1.get_default_graph()._last_loss_reduction
    return str(fn.__module__).startswith(optimizers.__package__) and reduction == v1.losses.Reduction.SUM
