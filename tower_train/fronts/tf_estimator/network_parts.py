"""Parts of canned networks, whose logits add up: deep, linear, and a constant. Each has its own optimizer.

Variables have the names of TensorFlow 1.15, so its checkpoints can be evaluated, exported and warm-started from.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import feature_columns
from tower_train.fronts.tf_estimator.heads import Head
from tower_train.fronts.tf_estimator.keras_optimizers import KerasOptimizer, copies_of
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys

v1 = tf.compat.v1
_BATCH_NORM_MOMENTUM, _BATCH_NORM_EPSILON = 0.999, 1e-3  # 1.15's canned/dnn.py, and tf.layers' default
_OPTIMIZERS = {
    "Adagrad": v1.train.AdagradOptimizer,
    "Adam": v1.train.AdamOptimizer,
    "Ftrl": v1.train.FtrlOptimizer,
    "RMSProp": v1.train.RMSPropOptimizer,
    "SGD": v1.train.GradientDescentOptimizer,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a network.

    Attributes:
      optimizer: a name of 1.15's, an optimizer of tf.compat.v1.train or of Keras, or a function that returns one.
      rate: the learning rate of an optimizer that is given by its name.
    """

    optimizer: Any
    rate: float

    scope: ClassVar[str]  # of its variables

    def __post_init__(self):
        if not callable(self.optimizer):
            self.make_optimizer()

    def logits(self, features, mode: str, units: int) -> tf.Tensor:
        """Returns [batch, units]."""
        raise NotImplementedError

    def make_optimizer(self) -> v1.train.Optimizer | KerasOptimizer:
        """Returns the optimizer; ConfigError if it is none."""
        optimizer = self.optimizer
        if isinstance(optimizer, str) and optimizer in _OPTIMIZERS:
            return _OPTIMIZERS[optimizer](self.rate)
        made = optimizer() if callable(optimizer) else optimizer
        if isinstance(made, keras.optimizers.LossScaleOptimizer):
            raise errors.ConfigError(
                f"optimizer={made!r}: canned Estimators compute in float32, which needs no loss scale. Give its inner "
                "optimizer."
            )
        if isinstance(made, keras.optimizers.Optimizer):
            return KerasOptimizer((lambda: made) if callable(optimizer) else copies_of(made))
        if not isinstance(made, v1.train.Optimizer):
            raise errors.ConfigError(
                f"optimizer={made!r}; it must be one of {', '.join(_OPTIMIZERS)}, an optimizer of "
                "tf.compat.v1.train or of Keras, such as AdamOptimizer(0.001), or a function that returns one."
            )
        return made


@dataclasses.dataclass(frozen=True)
class Deep(Part):
    """Fully connected layers on dense columns.

    Attributes:
      columns: the dense feature columns.
      hidden_units: over layers, their numbers of units.
      activation_fn: of each layer: a function, a name of Keras', or None.
      dropout: the share of a layer's outputs that is dropped in training; None for none.
      batch_norm: whether each layer's outputs are normalised, by the batch of its tower.
    """

    columns: tuple
    hidden_units: Sequence[int]
    activation_fn: Callable | str | None
    dropout: float | None
    batch_norm: bool

    scope: ClassVar[str] = "dnn"

    def __post_init__(self):
        super().__post_init__()
        units = self.hidden_units
        counts = list(units) if isinstance(units, (Sequence, np.ndarray)) else []
        if not counts or not all(isinstance(u, numbers.Integral) and u > 0 for u in counts):
            raise errors.ConfigError(
                f"hidden_units={units!r}; it must be a list of each layer's units, such as [10, 10]."
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise errors.ConfigError(f"dropout={self.dropout}; it must be from 0 to below 1, the share to drop.")

    def logits(self, features, mode, units):
        feature_columns.check_features(features, self.columns)
        activation, is_training = keras.activations.get(self.activation_fn), mode == ModeKeys.TRAIN
        with v1.variable_scope(self.scope):
            with v1.variable_scope("input_from_feature_columns"):
                net = feature_columns.input_layer(features, self.columns)
            for i, width in enumerate(self.hidden_units):
                with v1.variable_scope(f"hiddenlayer_{i}"):
                    net = activation(_linear(net, width))
                    if self.dropout and is_training:
                        net = tf.nn.dropout(net, self.dropout)
                    if self.batch_norm:
                        net = _batch_norm(net, f"batchnorm_{i}", is_training)
                _summarize(net, f"{self.scope}/hiddenlayer_{i}")
            with v1.variable_scope("logits"):
                net = _linear(net, units)
            _summarize(net, f"{self.scope}/logits")
        return net


@dataclasses.dataclass(frozen=True)
class Linear(Part):
    """A linear model on columns of any kind.

    Attributes:
      columns: the feature columns.
      sparse_combiner: "sum", "mean" or "sqrtn", for several categories of one example.
    """

    columns: tuple
    sparse_combiner: str

    scope: ClassVar[str] = "linear"

    def __post_init__(self):
        super().__post_init__()
        if self.sparse_combiner not in ("sum", "mean", "sqrtn"):
            raise errors.ConfigError(f"sparse_combiner={self.sparse_combiner!r}; it must be sum, mean or sqrtn.")

    def logits(self, features, mode, units):
        feature_columns.check_features(features, self.columns)
        with v1.variable_scope(self.scope):
            logits, variables = feature_columns.weighted_sum(features, self.columns, units, self.sparse_combiner)
            weights = [
                tf.reshape(value, [-1]) for key, values in variables.items() if key != "bias" for value in values
            ]
            v1.summary.histogram("bias", variables["bias"][0])
            v1.summary.scalar("fraction_of_zero_weights", tf.nn.zero_fraction(tf.concat(weights, 0)))
        return logits


@dataclasses.dataclass(frozen=True)
class Constant(Part):
    """The same logits for all examples."""

    scope: ClassVar[str] = "baseline"

    def logits(self, features, mode, units):
        values = features.values() if isinstance(features, dict) else [features]
        with v1.variable_scope(self.scope):
            bias = v1.get_variable("bias", [units], initializer=v1.zeros_initializer())
        return tf.tile(bias[tf.newaxis], [v1.shape(next(iter(values)))[0], 1])


def model_fn_of(head: Head, *parts: Part) -> Callable:
    """Returns the model_fn of a network of these parts."""

    def model_fn(features, labels, mode, config: RunConfig) -> EstimatorSpec:
        logits = tf.add_n([part.logits(features, mode, head.units) for part in parts])
        towers = config.towers if isinstance(config.towers, int) else len(config.towers)
        towers *= max(1, config.num_worker_replicas)

        def minimize(loss: tf.Tensor) -> tf.Operation:
            ops = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
            for part in parts:
                own = {"var_list": v1.trainable_variables(f"{part.scope}/")} if len(parts) > 1 else {}
                step = v1.train.get_global_step() if part is parts[-1] else None
                ops.append(part.make_optimizer().minimize(loss, global_step=step, **own))
            return tf.group(ops)

        return head.spec(features, labels, mode, logits, minimize, towers)

    return model_fn


def _linear(inputs: tf.Tensor, units: int) -> tf.Tensor:
    kernel = v1.get_variable("kernel", [inputs.shape[-1], units], initializer=v1.glorot_uniform_initializer())
    return tf.linalg.matmul(inputs, kernel) + v1.get_variable("bias", [units], initializer=v1.zeros_initializer())


def _batch_norm(inputs: tf.Tensor, name: str, is_training: bool) -> tf.Tensor:
    shape, ones, zeros = inputs.shape[-1:], v1.ones_initializer(), v1.zeros_initializer()
    with v1.variable_scope(name):
        gamma = v1.get_variable("gamma", shape, initializer=ones)
        beta = v1.get_variable("beta", shape, initializer=zeros)
        mean = v1.get_variable("moving_mean", shape, initializer=zeros, trainable=False)
        variance = v1.get_variable("moving_variance", shape, initializer=ones, trainable=False)
        used = (mean, variance)
        if is_training:
            used = tf.nn.moments(inputs, [0])
            for moving, value in zip((mean, variance), used, strict=True):
                update = moving.assign_sub((moving - value) * (1 - _BATCH_NORM_MOMENTUM))
                v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        return tf.nn.batch_normalization(inputs, *used, beta, gamma, _BATCH_NORM_EPSILON)


def _summarize(values: tf.Tensor, tag: str) -> None:
    """Adds 1.15's summaries of a layer's outputs: with the scope around it, their tags begin with dnn/dnn."""
    v1.summary.scalar(f"{tag}/fraction_of_zero_values", tf.nn.zero_fraction(values))
    v1.summary.histogram(f"{tag}/activation", values)
