"""The results of evaluations as events."""

import pathlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tower_train import console
from tower_train.run_dir import logs

v1 = tf.compat.v1
FILES = "*.tfevents.*"
_TEXT = v1.SummaryMetadata(plugin_data=v1.SummaryMetadata.PluginData(plugin_name="text"))


def write(folder: str, values: dict, checkpoint_path: str | None) -> None:
    """Writes the values of metrics: numbers as curves, arrays as tensors, and serialized summaries, such as images.

    Args:
      folder: of the event files.
      values: {metric: value}, including 'global_step'; a tuple has no event.
      checkpoint_path: of the evaluated checkpoint, written as a text; None if there is none.
    """
    points = []
    if checkpoint_path:
        path = tf.make_tensor_proto(checkpoint_path, tf.string)
        points.append(v1.Summary.Value(tag="checkpoint_path", metadata=_TEXT, tensor=path))
    for name, value in values.items():
        if name != "global_step":
            points.extend(_points(name, value))
    writer = logs.EventWriter(pathlib.Path(folder))
    writer.add(int(values["global_step"]), summary=v1.Summary(value=points))
    writer.close()


def read(paths: Iterable[pathlib.Path]) -> list[tuple[int, dict[str, float]]]:
    """Returns (step, {metric: number}) of the evaluations in files of events, in the steps' order."""
    found = {}
    for path in sorted(paths):
        for event in v1.train.summary_iterator(str(path)):
            numbers = {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}
            if numbers:
                found.setdefault(event.step, {}).update(numbers)
    return sorted(found.items())


def _points(name: str, value) -> list[v1.Summary.Value]:
    if isinstance(value, bytes):
        try:
            found = v1.Summary.FromString(value).value
        except DecodeError:
            console.notice(f"No event of the metric {name!r}: it is a string, but no serialized summary.")
            return []
        for i, part in enumerate(found):
            part.tag = f"{name}/{i}"
        return list(found)
    if isinstance(value, (tuple, list, dict)):
        return []
    if np.ndim(value) == 0:
        return [v1.Summary.Value(tag=name, simple_value=value)]
    return [v1.Summary.Value(tag=name, node_name=name, tensor=tf.make_tensor_proto(value))]
