"""A run's network as a SavedModel, with the signatures and numbered versions of TensorFlow Serving."""

import os
import pathlib
import time

import tensorflow as tf

from tower_train import errors
from tower_train.config import DeviceOptions, ExportOptions
from tower_train.data import publish
from tower_train.graph import devices
from tower_train.inference import saved_run, serving
from tower_train.workload import Workload

v1 = tf.compat.v1
_FILE = "saved_model.pb"


def export_run(options: ExportOptions, workload: Workload | None = None) -> tuple[pathlib.Path, list[str]]:
    """Writes a SavedModel that tf.saved_model.load, saved_model_cli and TensorFlow Serving run. Imports the run's
    workload if it is None.

    Returns:
      The SavedModel's folder, and the names of its signatures.

    Raises:
      RunError: the folder is there already, or cannot be written; or as serving.open_run.
    """
    folder = pathlib.Path(options.export_dir or f"{options.train_dir}/export")
    _check_target(folder, options)
    placed = devices.place(DeviceOptions(device="cpu"))
    built, session = serving.opened(saved_run.read(options, workload), placed)
    with session, built.graph.as_default():
        signature_defs = signatures(built)

        def fill(partial: pathlib.Path) -> None:
            partial.rmdir()  # which the builder makes itself
            builder, saver = v1.saved_model.Builder(str(partial)), v1.train.Saver(v1.global_variables())
            builder.add_meta_graph_and_variables(
                session, [tf.saved_model.SERVING], signature_defs, saver=saver, main_op=v1.tables_initializer()
            )
            builder.save()

        try:
            target, name = (_new_version(folder), "version") if options.versioned else (folder, "")
            publish.publish_folder(target, fill, lambda _: _check_target(folder, options), name)
        except (OSError, UnicodeEncodeError, tf.errors.OpError) as error:
            reason = errors.reason(error)
            raise errors.RunError(f"{folder} cannot be written ({reason}). Name another with --export_dir.") from None
    return target, list(signature_defs)


def signatures(built: serving.ServingGraph) -> dict:
    """Returns {name: SignatureDef} of a network: `serving_default`, which is `predict` too, maps features to all
    outputs; `files` does so from image files."""
    predict = v1.saved_model.predict_signature_def
    methods = {name: predict(built.features, built.outputs) for name in ("serving_default", "predict")}
    if built.files is not None:
        methods["files"] = predict({"files": built.files}, built.outputs)
    return methods


def _check_target(folder: pathlib.Path, options: ExportOptions) -> None:
    """Raises RunError if a folder may not be written to."""
    if os.path.islink(folder) and not (options.versioned and options.export_dir):
        raise errors.RunError(f"{folder} is a symbolic link. Name the folder itself with --export_dir.")
    is_there, is_model = os.path.exists(folder), os.path.exists(folder / _FILE)  # any name is allowed here
    if options.versioned and is_model:
        raise errors.RunError(
            f"{folder} is a SavedModel itself, and no folder of versions. Name another with --export_dir."
        )
    if options.overwrite and is_there and not is_model:
        raise errors.RunError(
            f"{folder} is there already and is no SavedModel, so it stays. Name another with --export_dir."
        )
    if is_there and not (options.versioned or options.overwrite):
        raise errors.RunError(
            f"{folder} is there already. Name another with --export_dir, replace it with --overwrite, or write "
            "numbered versions into a folder with --versioned."
        )


def _new_version(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a version: the time in seconds, as of tf.estimator's exporters, but above all versions."""
    names = os.listdir(folder) if os.path.exists(folder) else []
    versions = [int(name) for name in names if name.isdecimal()]
    return folder / str(max([int(time.time()), *(version + 1 for version in versions)]))
