"""A run's network as Keras' files: the model with its trained weights and its preparation, and the weights alone."""

import dataclasses
import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.config import DeviceOptions, ExportOptions
from tower_train.examples import Tensors
from tower_train.fronts.keras_building import build_isolated, kept_in, named_variables
from tower_train.graph import devices
from tower_train.graph.stream import prepared
from tower_train.inference import saved_run, serving
from tower_train.workload import Workload

v1 = tf.compat.v1
_MODEL, _PREPARED_MODEL, _WEIGHTS, _LABELS = "model.keras", "model.prepared.keras", "model.weights.h5", "id2label.json"
_COMPARED = 8  # examples
_MOST_CHANNELS = 16  # of a preparation that mixes them


class _Preparation(NamedTuple):
    """The effect of a workload's `prepare` on raw features [batch, ..., channels]: features @ matrix + offset."""

    shape: tuple[int, ...]  # of an example's raw features
    matrix: np.ndarray  # [channels, channels], or [channels] if it is diagonal
    offset: np.ndarray  # [channels]

    def layer(self, dtype: str) -> keras.layers.Layer:
        """Makes the layer that does it. It computes in `dtype`, as pixels have more digits than bfloat16."""
        if self.matrix.ndim == 1:
            return keras.layers.Rescaling(self.matrix.tolist(), self.offset.tolist(), dtype=dtype, name="preparation")
        layer = keras.layers.Dense(len(self.offset), trainable=False, dtype=dtype, name="preparation")
        layer.build([None, *self.shape])
        layer.set_weights([self.matrix, self.offset])
        return layer


def export(options: ExportOptions, folder: pathlib.Path, workload: Workload | None = None) -> list[str]:
    """Writes the Keras model that a workload's keras_network has, its weights and the names of its classes.

    model.keras takes raw features. If the workload's `prepare` is no layer of Keras, it is model.prepared.keras, which
    takes what `prepare` returns. Each file is loaded again and compared with the run's network, of one view.

    Args:
      options: the run, whether to replace files, and whether the model is to end by a softmax or sigmoid.
      folder: for the files.
      workload: the run's; None imports it.

    Returns:
      Lines about the files.

    Raises:
      RunError: the network is none of keras_network; the files are there, cannot be written, or are not what was
        trained when they are loaded; or as serving.open_run.
    """
    names = (_MODEL, _PREPARED_MODEL, _WEIGHTS, _LABELS)
    there = [folder / name for name in names if (folder / name).exists()]
    if there and not options.overwrite:
        raise errors.RunError(f"{there[0]} is there already. Name another --export_dir, or replace it by --overwrite.")
    placed = devices.place(DeviceOptions(device="cpu"))
    run = saved_run.read(dataclasses.replace(options, single_view=True), workload)
    build = getattr(run.workload.for_examples(run.examples).inference, "build", None)
    if build is None:
        raise errors.RunError(
            f"--keras: the network of workload {run.workload.name} is not made by tower_train.keras_network. Leave "
            "the option out to write a SavedModel."
        )
    features = run.examples.first(_COMPARED)[0]
    built, values, expected = _trained(run, placed, features)
    if options.probabilities and not built.class_names:
        raise errors.RunError("--probabilities: the outputs are none of classes with names. Leave the option out.")
    ends = built.is_probable or options.probabilities
    wanted = [expected["probabilities" if ends else "logits"]] if built.class_names else list(expected.values())
    preparation = _preparation(run.workload, features) if run.workload.prepare else None
    is_raw = preparation is not None or not run.workload.prepare
    inputs = features if is_raw else _prepared(run.workload, features)
    activation = ("sigmoid" if built.is_multi_label else "softmax") if ends and not built.is_probable else None
    main = _MODEL if is_raw else _PREPARED_MODEL
    written = [main, _WEIGHTS, *([_LABELS] if built.class_names else [])]

    def save(_) -> str:
        network = build()
        for name, variable in named_variables(network).items():
            variable.assign(values[name])
        model = _extended(network, inputs, preparation, activation, kept_in(run.dtype))
        labels = json.dumps(dict(enumerate(built.class_names or ())), indent=1, ensure_ascii=False)
        saves = model.save, network.save_weights, lambda path: path.write_text(f"{labels}\n", encoding="utf-8")
        writes = dict(zip(written, saves, strict=False))
        return _write(folder, writes, lambda path: _check(path, inputs, wanted, run.dtype))

    loads = build_isolated(save, run.dtype, valued=True)
    for name in set(names) - set(written):  # of an earlier export
        (folder / name).unlink(missing_ok=True)
    return [
        f"Exported: {', '.join(str(folder / name) for name in written)}",
        f"{main} {_use(built, is_raw, ends)}; loaded again it gave what the run's network gives of {len(wanted[0])} "
        f"examples.{loads}",
    ]


def _use(built: serving.ServingGraph, is_raw: bool, ends: bool) -> str:
    """Returns what an exported model takes and gives, in words."""
    takes = "raw features" if is_raw else "features as `prepare` of the workload makes them"
    takes += ", values 0 to 255 of images" if is_raw and built.files is not None else ""
    gives = "probabilities" if ends else "logits (--probabilities ends it by a softmax)"
    return f"takes {takes}{f', and gives {gives}' if built.class_names else ''}"


def _trained(run: saved_run.SavedRun, placed: devices.Devices, features) -> tuple[serving.ServingGraph, dict, dict]:
    """Returns a run's network, its variables' values and what it gives of features, both by name."""
    built, session = serving.opened(run, placed)
    with session, built.graph.as_default():
        values = session.run({variable.op.name: variable for variable in v1.global_variables()})
        feed = dict(zip(built.features.values(), tf.nest.flatten(features), strict=True))
        return built, values, session.run(built.outputs, feed)


def _write(folder: pathlib.Path, writes: dict[str, Callable[[pathlib.Path], Any]], check: Callable) -> str:
    """Writes files by name and, once the first is checked, puts all of them in place; returns what the check says."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial := folder / ".keras.partial", ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        try:
            for name, write in writes.items():
                write(partial / name)
            checked = check(partial / next(iter(writes)))
            for name in writes:
                os.replace(partial / name, folder / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, UnicodeEncodeError) as error:
        raise errors.RunError(
            f"{folder} cannot be written ({errors.reason(error)}). Name another with --export_dir."
        ) from None
    return checked


def _extended(
    network: keras.Model, features: Tensors, preparation: _Preparation | None, activation: str | None, dtype: str
) -> keras.Model:
    """Returns a model of features like these, with its preparation before it and an activation after it."""
    if preparation is None and activation is None:
        return network

    def placeholder(name: str, values: np.ndarray) -> keras.KerasTensor:
        kind = dtype if preparation else "string" if values.dtype == object else values.dtype.name
        return keras.Input(values.shape[1:], dtype=kind, name=name)

    if isinstance(features, dict):
        inputs = {name: placeholder(name, values) for name, values in features.items()}
    else:
        inputs = tf.nest.map_structure(lambda values: placeholder("features", values), features)
    outputs = network(preparation.layer(dtype)(inputs) if preparation else inputs)
    if activation:
        outputs = keras.layers.Activation(activation, dtype=dtype, name="probabilities")(outputs)
    return keras.Model(inputs, outputs, name=network.name)


def _preparation(workload: Workload, features: Tensors) -> _Preparation | None:
    """Finds what `prepare` does to features of one tensor, by what it makes of all 0, of all 1, of channels alone, of
    random features and of these examples; None if that is no sum over channels."""
    if not isinstance(features, np.ndarray) or features.ndim < 2 or features.dtype.kind not in "uif":
        return None
    shape, channels = features.shape[1:], features.shape[-1]
    unit = 255 if features.dtype == np.uint8 else 1
    probes = [np.zeros(shape, features.dtype), np.full(shape, unit, features.dtype)]
    if channels <= _MOST_CHANNELS:
        probes += [np.broadcast_to((unit * one).astype(features.dtype), shape) for one in np.eye(channels)]
    noise = np.random.default_rng(0).uniform(0, unit, [4, *shape]).astype(features.dtype)  # examples may all be grey
    given = np.concatenate([np.stack(probes), noise, features])
    found = _prepared(workload, given)
    if not isinstance(found, np.ndarray) or found.shape[1:] != shape or not np.isfinite(found).all():
        return None
    first = found.reshape(len(found), -1, channels)[:, 0].astype(np.float64)
    offset = first[0]
    for matrix in ((first[1] - offset) / unit, (first[2 : 2 + channels] - offset) / unit):
        raw = given.astype(np.float64)
        if matrix.ndim == 1 or len(matrix) == channels:
            made = (raw * matrix if matrix.ndim == 1 else raw @ matrix) + offset
            if np.allclose(made, found, rtol=1e-4, atol=1e-4 * np.abs(made).max()):
                return _Preparation(shape, matrix, offset)
    return None


def _prepared(workload: Workload, features: Tensors) -> Tensors:
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
        made = prepared(workload, tf.nest.map_structure(tf.constant, features))
        session.run(v1.tables_initializer())
        return session.run(made)


def _check(path: pathlib.Path, features: Tensors, wanted: list[np.ndarray], dtype: str) -> str:
    """Loads a model and compares its outputs with those of the run; returns what must be known of loading it. Raises
    RunError if it cannot be loaded, or gives other outputs."""
    remark = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the error tells
        try:
            model = keras.models.load_model(path, compile=False)
        except Exception as error:  # Keras raises anything
            if "safe_mode" not in str(error):
                text = " ".join(str(error).split())
                last = ": the file loses a category '' that comes last, give it a name" * ("vocabulary size" in text)
                raise _broken(f"Keras cannot load it again{last} ({text[:400].rstrip('.')})") from error
            remark = " It has a Lambda layer: load it with safe_mode=False."
            model = keras.models.load_model(path, compile=False, safe_mode=False)
    try:
        outputs = keras.tree.flatten(model(tf.nest.map_structure(tf.constant, features), training=False))
    except Exception as error:  # of a layer that did not come back as it was
        raise _broken(f"loaded again it fails: {errors.reason(error)}") from error
    tolerance = 0.1 if dtype in ("bfloat16", "float16") else 1e-3
    for values, expected in zip(outputs, wanted, strict=True):
        difference = np.abs(np.asarray(values, np.float64) - expected).max()
        if not difference <= tolerance * max(1.0, np.abs(expected).max()):
            raise _broken(f"loaded again it gives outputs that differ by {difference:.2g} from the run's")
    return remark


def _broken(why: str) -> errors.RunError:
    return errors.RunError(
        f"--keras: nothing is exported, since {why}. Leave the option out, for a SavedModel, or change that layer."
    )
