"""The examples of a run whose losses are the highest, as its report shows them."""

import dataclasses
import io
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.config import DeviceOptions
from tower_train.data import example_images
from tower_train.examples import Tensors
from tower_train.graph import devices
from tower_train.inference.evaluation_graph import evaluation_graph
from tower_train.inference.saved_run import SavedRun

_LOOKED_AT, _SHOWN = 1000, 12  # examples
_THUMBNAIL = 96  # pixels
_MOST_NUMBERS = 4  # of an output or a label


class Hard(NamedTuple):
    """An example: its loss; its label and prediction in words; and a PNG, or None and its features in the words."""

    loss: float
    words: str
    picture: bytes | None


def hardest(run: SavedRun, count: int = _SHOWN) -> tuple[int, str, list[Hard]]:
    """Returns the number of a run's examples that were looked at, at most _LOOKED_AT, their name, and the hardest.

    Raises ConfigError if the loss is not of outputs and labels alone.
    """
    sample, names = run.examples.sample(_LOOKED_AT), run.examples.class_names
    workload = dataclasses.replace(run.workload, metrics=(), mode={})
    placed, rows = devices.place(DeviceOptions(device="cpu")), []
    # One example a step: the loss of a step is the example's.
    built = evaluation_graph(workload, sample, 1, run.dtype, run.moving_average_decay, placed)
    if "loss" not in built.fetches:
        raise errors.ConfigError("the loss takes more than the outputs of an evaluation and labels.")
    with run.session(built.graph, built.restored, placed) as session:
        session.run(built.stream_initializer)
        for _ in range(built.num_steps):
            loss, pair = session.run((built.fetches["loss"], built.fetches["whole"]))
            rows.append((np.inf if np.isnan(loss) else float(loss), *(tf.nest.map_structure(lambda a: a[0], pair))))
    order = sorted(range(len(rows)), key=lambda i: -rows[i][0])[:count]
    features = sample.first(max(order) + 1)[0] if sample.elements else sample.subset(np.array(order)).first(count)[0]
    found = []
    for place, index in enumerate(order):
        loss, output, label = rows[index]
        was = " ".join(example_images.caption(label, names)) if names else _in_words(label)
        became = names[output.argmax()] if built.has_classes else _in_words(output)
        row = index if sample.elements else place
        picture, told = _shown(tf.nest.map_structure(lambda array, row=row: array[row], features))
        became = "as predicted" if was == became else f"predicted {became[:80]}"
        found.append(Hard(loss, f"{told[:200]} {was[:80]}, {became}".strip(), picture))
    return sample.num_examples, run.examples.name, found


def _in_words(values) -> str:
    values = np.ravel(tf.nest.flatten(values)[0])
    shown = [each.decode(errors="replace") if isinstance(each, bytes) else f"{each:.4g}" for each in values]
    return ", ".join(shown[:_MOST_NUMBERS]) + (", ..." if len(shown) > _MOST_NUMBERS else "")


def _shown(features: Tensors) -> tuple[bytes | None, str]:
    """Returns the first image among an example's features as a PNG, and else None and the features in words."""
    named = features.items() if isinstance(features, dict) else [("", features)]
    parts = [(name, leaf) for name, each in named for leaf in tf.nest.flatten(each)]
    for _, values in parts:
        if values.ndim == 3 and values.shape[-1] in (1, 3, 4) and values.dtype.kind in "uif":
            picture = example_images.thumbnail(example_images.as_bytes(values), _THUMBNAIL)
            picture.save(file := io.BytesIO(), "PNG")
            return file.getvalue(), ""
    return None, "; ".join(f"{name} {_in_words(values)}".strip() for name, values in parts) + ":"
