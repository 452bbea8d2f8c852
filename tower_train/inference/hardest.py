"""The examples of a run whose losses are the highest, as its report shows them."""

import dataclasses
import io
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tower_train.config import DeviceOptions
from tower_train.examples import Examples, Tensors, Weighted
from tower_train.graph import devices, towers
from tower_train.inference import network
from tower_train.inference.evaluation_graph import evaluation_graph
from tower_train.inference.saved_run import SavedRun
from tower_train.measures import softmax_cross_entropies
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1
_LOOKED_AT, _BATCH = 1000, 50  # examples
_THUMBNAIL = 96  # pixels
_MOST_NUMBERS = 4  # of an output or a label


class Hard(NamedTuple):
    """An example: its loss, its label and the network's output in words, and a PNG or its features in words."""

    loss: float
    label: str
    output: str
    picture: bytes | None
    features: str


def hardest(run: SavedRun, count: int) -> tuple[int, list[Hard]]:
    """Returns how many of a run's examples were looked at, at most _LOOKED_AT, and those of the highest losses."""
    sample, names = run.examples.sample(_LOOKED_AT), run.examples.class_names

    def metrics(given: Tensors, labels: Tensors) -> dict[str, tf.Tensor]:
        told = []
        if network.are_of_classes(given, run.examples):
            told = [tf.argmax(given, axis=-1)]
        elif tf.is_tensor(given) and given.shape.rank == 2:
            told = [given[:, i] for i in range(min(given.shape[-1], _MOST_NUMBERS + 1))]
        return {"loss": _losses(run, given, labels)} | {f"told {i}": each for i, each in enumerate(told)}

    workload = dataclasses.replace(run.workload, metrics=metrics, mode={})
    placed = devices.place(DeviceOptions(device="cpu"))
    built, rows = evaluation_graph(workload, sample, _BATCH, run.dtype, run.moving_average_decay, placed), []
    with built.graph.as_default(), v1.Session(config=placed.session_config) as session:
        saver = v1.train.Saver(built.restored)
        session.run([v1.local_variables_initializer(), v1.tables_initializer(), built.stream_initializer])
        run.use_checkpoint(lambda path: checkpoint.restore(saver, session, path))
        for _ in range(built.num_steps):
            rows.append(session.run(built.metrics))
    values = {name: np.concatenate([row[name] for row in rows]) for name in built.metrics}
    losses = np.nan_to_num(values.pop("loss").astype(np.float64), nan=np.inf)
    order = np.argsort(-losses, kind="stable")[:count]
    features, labels = _examples(sample, order)
    told = np.stack([*values.values(), np.zeros(len(losses))], axis=1)[order, :-1]
    outputs = [names[int(each[0])] if built.has_classes else _in_words(each) for each in told]
    return sample.num_examples, [
        Hard(
            float(losses[index]),
            _in_words(tf.nest.map_structure(lambda a, i=i: a[i], labels), names),
            outputs[i],
            *_shown(tf.nest.map_structure(lambda a, i=i: a[i], features)),
        )
        for i, index in enumerate(order)
    ]


def _losses(run: SavedRun, outputs: Tensors, labels: Tensors) -> tf.Tensor:
    """Returns the loss of each example, of a loss that is a mean over a batch."""
    if towers.is_of_classes(run.workload.loss):
        return softmax_cross_entropies(outputs, labels)

    def of_one(each: tuple[Tensors, Tensors]) -> tf.Tensor:
        alone = tf.nest.map_structure(lambda tensor: tensor[tf.newaxis], each)
        return tf.cast(towers.loss_of(run.workload, *alone), tf.float32)

    return tf.map_fn(of_one, (outputs, labels), fn_output_signature=tf.float32)


def _examples(examples: Examples, order: np.ndarray) -> tuple[Tensors, Tensors]:
    """Returns (features, labels) of some examples, in this order."""
    if not examples.elements:
        features, labels = examples.subset(order).first(len(order))
        return features, Weighted.of(labels).labels
    features, labels = examples.first(int(order.max()) + 1)
    return tf.nest.map_structure(lambda array: array[order], (features, Weighted.of(labels).labels))


def _in_words(values, names: tuple[str, ...] = ()) -> str:
    values = np.asarray(tf.nest.flatten(values)[0])
    if names and values.ndim == 0:
        return names[int(values)]
    if names and values.shape == (len(names),):  # of several classes at once
        return ", ".join(name for name, value in zip(names, values, strict=True) if value) or "none"
    shown = [each.decode(errors="replace") if isinstance(each, bytes) else f"{each:.4g}" for each in values.ravel()]
    return ", ".join(shown[:_MOST_NUMBERS]) + (", ..." if len(shown) > _MOST_NUMBERS else "")


def _shown(features: Tensors) -> tuple[bytes | None, str]:
    """Returns the first image among an example's features as a PNG, and else None and the features in words."""
    from PIL import Image

    for values in map(np.asarray, tf.nest.flatten(features)):
        if values.ndim == 3 and values.shape[-1] in (1, 3, 4):
            if values.dtype != np.uint8:
                values = np.nan_to_num(values.astype(np.float64))
                values = np.uint8((values - values.min()) / (np.ptp(values) or 1) * 255)
            image = Image.fromarray(values[:, :, 0] if values.shape[-1] == 1 else values)
            scale, how = _THUMBNAIL / max(image.size), Image.Resampling.BILINEAR
            image = image.resize([max(1, round(scale * side)) for side in image.size], how if scale < 1 else 0)
            image.save(file := io.BytesIO(), "PNG")
            return file.getvalue(), ""
    parts = features.items() if isinstance(features, dict) else [("", each) for each in tf.nest.flatten(features)]
    return None, "; ".join(f"{name} {_in_words(values)}".strip() for name, values in parts)
