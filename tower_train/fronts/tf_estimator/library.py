# ruff: noqa: F401 - what is imported here is for the modules beside
"""The library tensorflow-estimator on today's TensorFlow: stand-ins for what TensorFlow has dropped, and private names.

Importing this module imports the library. tests/fronts/test_compat.py fails when one of its names goes away or changes
its meaning; setup.py names its version, which is its last.
"""

import contextlib
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.training import training as training_module
from tensorflow.python.util import deprecation, tf_export

from tower_train.fronts import compat

v1 = tf.compat.v1
SERVING = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
_BATCH_NORM_MOMENTUM, _BATCH_NORM_EPSILON = 0.999, 1e-3  # the library's, and tf.layers' default


def _init_run_config(config, tf_config: dict) -> None:
    """Stands for TensorFlow's function that set up a RunConfig with strategies: towers need nothing of it."""
    given = config._experimental_distribute
    for name in ("train_distribute", "eval_distribute") if given else ():
        if getattr(given, name, None):
            if getattr(config, name):
                raise ValueError(f"Either `{name}` or `experimental_distribute.{name}` can be set.")
            setattr(config, f"_{name}", getattr(given, name))
    config._distribute_coordinator_mode = None
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
        package, _, short = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        setattr(importlib.import_module(package), short, module)
    tf_export.ESTIMATOR_API_NAME = name = "estimator"
    for table, version in ((tf_export.API_ATTRS, ""), (tf_export.API_ATTRS_V1, "_v1")):
        attributes = type(table[tf_export.TENSORFLOW_API_NAME])
        table[name] = attributes(f"_estimator_api_names{version}", f"_estimator_api_constants{version}")


_put_in_place()
with compat.replaced(deprecation, "deprecated", lambda *_, **__: lambda function: function):  # by Keras, it says
    from tensorflow_estimator.python.estimator import (
        early_stopping,
        estimator,
        exporter,
        extenders,
        model_fn,
        run_config,
        training,
        util,
    )
    from tensorflow_estimator.python.estimator.canned import (
        baseline,
        dnn,
        dnn_linear_combined,
        kmeans,
        linear,
        optimizers,
        parsing_utils,
    )
    from tensorflow_estimator.python.estimator.export import export_lib
    from tensorflow_estimator.python.estimator.hooks import basic_session_run_hooks as hooks_of_sessions
    from tensorflow_estimator.python.estimator.hooks import hooks, session_run_hook
    from tensorflow_estimator.python.estimator.inputs import numpy_io, pandas_io
    from tensorflow_estimator.python.estimator.mode_keys import ModeKeys
    from tensorflow_estimator.python.estimator.model_fn import EstimatorSpec


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Silences TensorFlow's deprecations of its own names within this block."""

    def is_other(record: logging.LogRecord) -> bool:
        return "deprecated and will be removed" not in str(record.msg)

    logger = tf.get_logger()
    logger.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*add_variable.* is deprecated")
            yield
    finally:
        logger.removeFilter(is_other)


class LinearModel:
    """Stands for the canned linear model, a Keras 2 model, with its arguments and its variables."""

    def __init__(self, feature_columns, units=1, sparse_combiner="sum", trainable=True, name=None):
        self._arguments, self._variables = (feature_columns, units, sparse_combiner, None, trainable), {}

    def __call__(self, features) -> tf.Tensor:
        if not isinstance(features, dict):
            raise ValueError(f"We expected a dictionary here. Instead we got: {features}")
        v1.get_variable_scope().set_partitioner(None)  # there are no parameter servers
        with _without_deprecations():
            return v1.feature_column.linear_model(features, *self._arguments, cols_to_vars=self._variables)

    @property
    def bias(self) -> tf.Variable:
        return self._variables["bias"][0]

    @property
    def variables(self) -> list[tf.Variable]:
        return tf.nest.flatten(list(self._variables.values()))


class DNNModel:
    """Stands for the canned deep model, a Keras 2 model of tf.layers, with its arguments and its variables."""

    def __init__(
        self, units, hidden_units, feature_columns, activation_fn, dropout, input_layer_partitioner, batch_norm,
        name=None,
    ):  # fmt: skip
        self._units, self._hidden_units, self._columns = units, hidden_units, feature_columns
        self._activation = tf.keras.activations.get(activation_fn)
        self._dropout, self._batch_norm = dropout, batch_norm

    def __call__(self, features, mode) -> tf.Tensor:
        is_training = mode == ModeKeys.TRAIN
        v1.get_variable_scope().set_partitioner(None)  # there are no parameter servers
        with v1.variable_scope("input_from_feature_columns"), _without_deprecations():
            net = v1.feature_column.input_layer(features, self._columns)
        for i, width in enumerate(self._hidden_units):
            with v1.variable_scope(f"hiddenlayer_{i}") as scope:
                net = self._activation(_dense(net, width))
                if self._dropout and is_training:
                    net = tf.nn.dropout(net, self._dropout)
                if self._batch_norm:
                    net = _batch_norm(net, f"batchnorm_{i}", is_training)
            dnn._add_hidden_layer_summary(net, scope.name)
        with v1.variable_scope("logits") as scope:
            net = _dense(net, self._units)
        dnn._add_hidden_layer_summary(net, scope.name)
        return net


def _dense(inputs: tf.Tensor, units: int) -> tf.Tensor:
    kernel = v1.get_variable("kernel", [inputs.shape[-1], units], initializer=v1.glorot_uniform_initializer())
    return tf.linalg.matmul(inputs, kernel) + v1.get_variable("bias", [units], initializer=v1.zeros_initializer())


def _batch_norm(inputs: tf.Tensor, name: str, is_training: bool) -> tf.Tensor:
    with v1.variable_scope(name):
        gamma, beta, mean, variance = (
            v1.get_variable(part, inputs.shape[-1:], initializer=initializer, trainable=not part.startswith("moving"))
            for part, initializer in (
                ("gamma", v1.ones_initializer()), ("beta", v1.zeros_initializer()),
                ("moving_mean", v1.zeros_initializer()), ("moving_variance", v1.ones_initializer()),
            )
        )  # fmt: skip
        used = (mean, variance)
        if is_training:
            used = tf.nn.moments(inputs, [0])
            for moving, value in zip((mean, variance), used, strict=True):
                update = moving.assign_sub((moving - value) * (1 - _BATCH_NORM_MOMENTUM))
                v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        return tf.nn.batch_normalization(inputs, *used, beta, gamma, _BATCH_NORM_EPSILON)


linear.LinearModel, dnn._DNNModel = LinearModel, DNNModel


def convert_metrics(convert: Callable[[str, object], tuple]) -> None:
    """Lets a function (name, metric) -> (value, update_op) convert the metrics of each EstimatorSpec first."""
    validate = model_fn._validate_eval_metric_ops

    def converted(metrics):
        if isinstance(metrics, dict):
            metrics = {name: convert(name, metric) for name, metric in metrics.items()}
        return validate(metrics)

    model_fn._validate_eval_metric_ops = converted


def convert_optimizers(convert: Callable) -> None:
    """Lets a function convert the optimizer of each canned Estimator to one of v1.train's kind, or to None."""
    get_instance = optimizers.get_optimizer_instance
    optimizers.get_optimizer_instance = lambda opt, learning_rate=None: convert(opt) or get_instance(opt, learning_rate)


def is_summed(fn: Callable) -> bool:
    """Returns whether a model_fn is a canned one, and the last loss in the default graph a sum over the batch."""
    reduction = v1.get_default_graph()._last_loss_reduction
    return str(fn.__module__).startswith(baseline.__name__.rpartition(".")[0]) and reduction == v1.losses.Reduction.SUM


def opened_by(open_session: Callable):
    """Lets a function of the same arguments stand for v1.train.MonitoredTrainingSession within this block."""
    return compat.replaced(training_module, "MonitoredTrainingSession", open_session)


def withdraw_stop(run_context: v1.train.SessionRunContext) -> None:
    """Takes back a hook's request to stop."""
    run_context._stop_requested = False
