"""The SavedModel of a model_fn, and the records of its inputs and outputs."""

import os
import shutil
from typing import Any, NamedTuple

import tensorflow as tf

from tower_train.fronts import compat
from tower_train.fronts.tf_estimator.spec import EstimatorSpec

v1 = tf.compat.v1
PredictOutput = compat.PredictOutput
ClassificationOutput = compat.ClassificationOutput
RegressionOutput = compat.RegressionOutput


class ServingInputReceiver(NamedTuple):
    """The inputs of a served model.

    Attributes:
      features: those of model_fn.
      receiver_tensors: a placeholder, or a dict of them, that requests are fed to.
      receiver_tensors_alternatives: {name: further ones}.
    """

    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: dict | None = None


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


def write(
    base: str, receiver: ServingInputReceiver, spec: EstimatorSpec, checkpoint: str, assets: dict, as_text: bool
) -> bytes:
    """Writes the default graph, with a checkpoint's values, into a new directory under base, and returns its path."""
    outputs = compat.export_outputs_for_mode(spec.mode, spec.export_outputs, spec.predictions)
    signatures = compat.build_all_signature_defs(
        receiver.receiver_tensors, outputs, receiver.receiver_tensors_alternatives
    )
    directory = compat.get_timestamped_export_dir(base)
    # Written under another name first: whoever watches the base directory must not find half a model.
    temporary = compat.get_temp_export_dir(directory)
    saver = (spec.scaffold and spec.scaffold.saver) or v1.train.Saver(sharded=True)
    local_init_op = (spec.scaffold and spec.scaffold.local_init_op) or v1.train.Scaffold.default_local_init_op()
    with v1.Session() as session:
        saver.restore(session, checkpoint)
        session.run(local_init_op)
        builder = v1.saved_model.Builder(temporary)
        builder.add_meta_graph_and_variables(
            session, [tf.saved_model.SERVING], signatures, v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=local_init_op, saver=saver, strip_default_attrs=True,
        )  # fmt: skip
        builder.save(as_text)
    for name, source in assets.items():
        target = os.path.join(os.fsdecode(temporary), "assets.extra", name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source, target)
    os.rename(temporary, directory)
    return os.fsencode(directory)
