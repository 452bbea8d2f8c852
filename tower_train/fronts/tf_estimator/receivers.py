"""The records of an exported model's inputs and outputs: `tower_train.estimator.export`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator.inputs import Inputs

v1 = tf.compat.v1
ExportOutput = compat.ExportOutput
PredictOutput = compat.PredictOutput
ClassificationOutput = compat.ClassificationOutput
RegressionOutput = compat.RegressionOutput
EvalOutput = compat.EvalOutput
SERVING = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY

_FEATURE, _LABEL, _RECEIVER = "feature", "label", "input"  # names of tensors that have none
_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)


class _Serving(NamedTuple):
    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: dict | None = None


class ServingInputReceiver(_Serving):
    """The inputs of a served model.

    Args:
      features: those of model_fn, {name: tensor}; a single tensor becomes {"feature": it}.
      receiver_tensors: a placeholder, or a dict of them, to which requests are fed.
      receiver_tensors_alternatives: {name: further ones}.

    Raises:
      ConfigError: one of them is missing or no tensor.
    """

    __slots__ = ()

    def __new__(cls, features, receiver_tensors, receiver_tensors_alternatives=None):
        alternatives = receiver_tensors_alternatives
        if alternatives is not None:
            if not isinstance(alternatives, dict):
                raise errors.ConfigError(f"receiver_tensors_alternatives is {alternatives!r}; it must be a dict.")
            alternatives = {name: _dict_of("receiver_tensors", t, _RECEIVER) for name, t in alternatives.items()}
        receivers = _dict_of("receiver_tensors", receiver_tensors, _RECEIVER)
        return super().__new__(cls, cls._features(features), receivers, alternatives)

    @classmethod
    def _features(cls, features):
        return _dict_of("features", features, _FEATURE)


class TensorServingInputReceiver(ServingInputReceiver):
    """A ServingInputReceiver of a model_fn whose features are a single tensor."""

    __slots__ = ()

    @classmethod
    def _features(cls, features):
        return _dict_of("features", features, _FEATURE)[_FEATURE]


class UnsupervisedInputReceiver(ServingInputReceiver):
    """The inputs of an exported graph for training or evaluation without labels."""

    __slots__ = ()


class _Supervised(NamedTuple):
    features: Any
    labels: Any
    receiver_tensors: Any


class SupervisedInputReceiver(_Supervised):
    """The inputs of an exported graph for training or evaluation.

    Args:
      features, labels: those of model_fn.
      receiver_tensors: a placeholder, or a dict of them, that is fed.

    Raises:
      ConfigError: one of them is missing or no tensor.
    """

    __slots__ = ()

    def __new__(cls, features, labels, receiver_tensors):
        _dict_of("features", features, _FEATURE)
        _dict_of("labels", labels, _LABEL)
        return super().__new__(cls, features, labels, _dict_of("receiver_tensors", receiver_tensors, _RECEIVER))


def build_raw_serving_input_receiver_fn(features: dict, default_batch_size: int | None = None):
    """Makes a serving_input_receiver_fn whose requests are the features themselves.

    Args:
      features: {name: a tensor with the dtype and the shape [batch, ...] of requests}.
      default_batch_size: the batch size of requests; None for any.
    """
    specs = {name: (tensor.dtype, [default_batch_size, *tensor.shape[1:]]) for name, tensor in features.items()}

    def receive():
        tensors = {name: v1.placeholder(dtype, shape, name) for name, (dtype, shape) in specs.items()}
        return ServingInputReceiver(tensors, tensors)

    return receive


def build_parsing_serving_input_receiver_fn(feature_spec: dict, default_batch_size: int | None = None):
    """Makes a serving_input_receiver_fn whose requests are serialized tf.train.Examples.

    Args:
      feature_spec: as of tf.io.parse_example.
      default_batch_size: the batch size of requests; None for any.
    """

    def receive():
        serialized = v1.placeholder(tf.string, [default_batch_size], "input_example_tensor")
        features = tf.io.parse_example(serialized, feature_spec)
        return ServingInputReceiver(features, {"examples": serialized})

    return receive


def build_raw_supervised_input_receiver_fn(features, labels, default_batch_size: int | None = None):
    """Makes an input receiver function, for the modes TRAIN and EVAL, that is fed with features and labels themselves.

    Args:
      features, labels: a tensor with the dtype and the shape [batch, ...] of the feed, or {name: tensor}.
      default_batch_size: the batch size; None for any.

    Raises:
      ConfigError: a feature and a label have the same name.
    """
    parts = [(_RECEIVER, features), (_LABEL, labels)]
    names = [set(part) if isinstance(part, dict) else {name} for name, part in parts]
    if names[0] & names[1]:
        raise errors.ConfigError(
            f"features and labels are both called {', '.join(sorted(names[0] & names[1]))}. Rename one of them."
        )

    def receive():
        found = [tf.nest.map_structure(lambda t: _placeholder(t, default_batch_size), part) for _, part in parts]
        fed = [
            tensors if isinstance(tensors, dict) else {name: tensors}
            for (name, _), tensors in zip(parts, found, strict=True)
        ]
        return SupervisedInputReceiver(*found, fed[0] | fed[1])

    return receive


def build_supervised_input_receiver_fn_from_input_fn(input_fn: Callable, **arguments):
    """Makes an input receiver function, for the modes TRAIN and EVAL, with the features and labels of an input_fn.

    Args:
      input_fn: as for Estimator.train.
      arguments: passed on to it.
    """
    with tf.Graph().as_default():
        features, labels = Inputs(input_fn, arguments).next_batch()
    return build_raw_supervised_input_receiver_fn(features, labels)


def _placeholder(tensor: tf.Tensor, batch_size: int | None) -> tf.Tensor:
    name = None if hasattr(tensor, "numpy") else tensor.op.name  # an eager tensor has no op
    return v1.placeholder(tensor.dtype, [batch_size, *tensor.shape[1:]], name)


def _dict_of(field: str, tensors, name: str) -> dict:
    found = tensors if isinstance(tensors, dict) else {name: tensors}
    for key, tensor in found.items():
        if not isinstance(tensor, _TENSORS):
            raise errors.ConfigError(f"{field}: {key!r} is {tensor!r}; it must be a tensor, or a dict of tensors.")
    return found
