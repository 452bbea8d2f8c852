"""A run's network as Keras' files: the model with its trained weights, and the weights alone."""

import os
import pathlib

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.config import DeviceOptions, ExportOptions
from tower_train.fronts.keras_building import build_isolated, named_variables
from tower_train.graph import devices
from tower_train.inference import saved_run, serving
from tower_train.workload import Workload

_FILES = ("model.keras", "model.weights.h5")


def export(options: ExportOptions, folder: pathlib.Path, workload: Workload | None = None) -> list[str]:
    """Writes model.keras and model.weights.h5 of the Keras model that a workload's keras_network has.

    Args:
      options: the run, and whether to replace files.
      folder: for the files.
      workload: the run's; None imports it.

    Returns:
      Lines about the files.

    Raises:
      RunError: the network is none of keras_network, or the files are there or cannot be written; or as
        serving.open_run.
    """
    there = [folder / name for name in _FILES if (folder / name).exists()]
    if there and not options.overwrite:
        raise errors.RunError(f"{there[0]} is there already. Name another --export_dir, or replace it by --overwrite.")
    placed = devices.place(DeviceOptions(device="cpu"))
    run = saved_run.read(options, workload)
    build = getattr(run.workload.for_examples(run.examples).inference, "build", None)
    if build is None:
        raise errors.RunError(
            f"--keras: the network of workload {run.workload.name} is no tower_train.keras_network(build). Leave the "
            "option out, for a SavedModel."
        )
    built, session = serving.opened(run, placed)
    with session, built.graph.as_default():
        values = session.run({variable.op.name: variable for variable in tf.compat.v1.global_variables()})

    def save(_) -> None:
        model = build()
        for name, variable in named_variables(model).items():
            variable.assign(values[name])
        try:
            _write(model, folder)
        except (OSError, UnicodeEncodeError) as error:
            raise errors.RunError(
                f"{folder} cannot be written ({errors.reason(error)}). Name another with --export_dir."
            ) from None

    build_isolated(save, run.dtype, valued=True)
    prepared = ", for features as `prepare` of the workload makes them" if run.workload.prepare else ""
    return [f"Exported: {', '.join(str(folder / name) for name in _FILES)}{prepared}"]


def _write(model: keras.Model, folder: pathlib.Path) -> None:
    """Writes the files, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in zip(_FILES, (model.save, model.save_weights), strict=True):
        partial = folder / f".{os.getpid()}.{name}"
        try:
            write(partial)
            os.replace(partial, folder / name)
        finally:
            partial.unlink(missing_ok=True)
