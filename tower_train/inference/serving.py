"""A trained network for use: from raw features, or from image files, to class probabilities."""

import dataclasses
import os
import pathlib
import shutil

import tensorflow as tf

from tower_train import errors
from tower_train.config import RunOptions
from tower_train.data import decoding
from tower_train.graph import towers, update
from tower_train.graph.devices import HOST
from tower_train.graph.variables import Variables
from tower_train.inference import saved_run
from tower_train.run_dir import checkpoint
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
FEATURES, FILES = "serving_default", "files"  # names of the signatures


@dataclasses.dataclass(frozen=True)
class ServingGraph:
    """A network with its inputs and outputs.

    Attributes:
      graph: the graph.
      features: placeholder [batch, ...] of raw features, as the workload's examples have them.
      files: string placeholder [batch] of the contents of JPEG or PNG files; None if features are not uint8 images.
      outputs: by signature, {name: tensor [batch, classes]}: logits, probabilities, and the classes' names.
      restored: {name in the checkpoint: variable}.
    """

    graph: tf.Graph
    features: tf.Tensor
    files: tf.Tensor | None
    outputs: dict[str, dict[str, tf.Tensor]]
    restored: dict[str, tf.Variable]


def serving_graph(run: saved_run.SavedRun) -> ServingGraph:
    """Builds a run's network on one device, as evaluation does.

    Raises:
      ConfigError: labels are not classes, or an example has several features.
    """
    workload, examples = run.workload, run.examples
    if not examples.class_names:
        raise errors.ConfigError(f"workload {workload.name} has no class_names, so its outputs are no probabilities.")
    workload = workload.for_examples(examples)
    raw = _raw_features(examples)
    with tf.Graph().as_default() as graph, tf.device(HOST):
        features = v1.placeholder(raw.dtype, [None, *raw.shape[1:]], name="features")
        is_image = raw.dtype == tf.uint8 and raw.shape.rank == 4 and raw.shape[-1] in (1, 3)
        files = v1.placeholder(tf.string, [None], name="files") if is_image else None

        def network(features):
            features = workload.prepare(features) if workload.prepare else features
            with towers.scope(0, HOST, Variables(), towers.restored):
                logits, _ = towers.tower_loss(workload, features, None, tf.as_dtype(run.dtype), training=False)
            names = tf.tile(tf.constant([examples.class_names]), [tf.shape(logits)[0], 1])
            return {"logits": logits, "probabilities": tf.nn.softmax(logits), "classes": names}

        outputs = {FEATURES: network(features)}
        if is_image:
            size = raw.shape[1:]
            images = tf.map_fn(
                lambda contents: decoding.decode_contents(contents, *size), files, fn_output_signature=tf.uint8
            )
            with v1.variable_scope(v1.get_variable_scope(), reuse=True):
                outputs[FILES] = network(tf.ensure_shape(images, [None, *size]))
        restored = update.variables_to_restore(run.moving_average_decay)
    return ServingGraph(graph, features, files, outputs, restored)


def open_run(options: RunOptions, workload: Workload | None = None) -> tuple[ServingGraph, v1.Session]:
    """Opens a session with the network of a run's checkpoint; the caller closes it.

    Raises:
      RunError: no run, no checkpoint, or one of another network.
      ConfigError: as serving_graph.
    """
    run = saved_run.read(options, workload)
    run.checkpoint()  # raises if there is none, before the graph is built
    built = serving_graph(run)
    with built.graph.as_default():
        saver = v1.train.Saver(built.restored)
    session = v1.Session(graph=built.graph, config=v1.ConfigProto(device_count={"GPU": 0}))
    run.use_checkpoint(lambda path: checkpoint.restore(saver, session, path))
    return built, session


def export(options: RunOptions, folder: pathlib.Path, workload: Workload | None = None) -> list[str]:
    """Writes a SavedModel that tf.saved_model.load and saved_model_cli run.

    Returns:
      The names of its signatures.

    Raises:
      RunError: the folder is there already, or cannot be written; or as open_run.
    """
    if os.path.exists(folder):
        raise errors.RunError(f"{folder} is there already. Remove it, or name another with --export_dir.")
    built, session = open_run(options, workload)
    inputs = {FEATURES: {"features": built.features}, FILES: {"files": built.files}}
    with session, built.graph.as_default():
        signatures = {
            name: v1.saved_model.predict_signature_def(inputs[name], outputs) for name, outputs in built.outputs.items()
        }
        # Written under another name first: what an interrupted export leaves is no SavedModel, and not in the way.
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            builder = v1.saved_model.Builder(str(temporary))
            builder.add_meta_graph_and_variables(
                session, [tf.saved_model.SERVING], signatures, saver=v1.train.Saver(v1.global_variables())
            )
            builder.save()
            os.rename(temporary, folder)
        except (OSError, UnicodeEncodeError, tf.errors.OpError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = checkpoint.reason(error)
            raise errors.RunError(f"{folder} cannot be written ({reason}). Name another with --export_dir.") from None
    return list(signatures)


def _raw_features(examples: Examples) -> tf.Tensor:
    """A symbolic batch of one."""
    with tf.Graph().as_default():
        features, _ = examples.symbolic_batch()
        if not isinstance(features, tf.Tensor):
            raise errors.ConfigError(f"{examples.name}: an example has several features; only one can be served.")
        return features
