"""A trained network for use: from raw features or image files to its outputs, or to classes and scores."""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tower_train.config import DeviceOptions, RunOptions
from tower_train.examples import Examples, Tensors, Weighted
from tower_train.graph import devices, gradients, stream, towers, xla
from tower_train.graph.devices import HOST
from tower_train.graph.draws import Draws
from tower_train.graph.layout import Tower
from tower_train.graph.variables import Variables
from tower_train.inference import network, saved_run
from tower_train.workload import Workload

v1 = tf.compat.v1
Named = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class ServingGraph:
    """A network with its inputs and outputs. Feeding an input overrides those after it."""

    graph: tf.Graph
    files: tf.Tensor | None  # string [batch] of the contents of image files; None if features are not uint8 images
    features: Named  # {name: [batch, ...]}, raw, as the workload's examples have them
    # {name: [batch, ...]}: the network's own; or, if there are class_names, `logits` and `probabilities` [batch,
    # classes], `classes` [batch], the names of the most probable ones unless examples are of several at once, and
    # `all_classes` [batch, classes], the names of the columns
    outputs: Named
    class_names: tuple[str, ...]  # names of the columns; empty if outputs are not one per class
    is_multi_label: bool  # whether examples are of several classes at once
    is_probable: bool  # whether the network itself ends by the softmax or sigmoid of classes
    restored: dict[str, tf.Variable]  # {name in the checkpoint: variable}


def serving_graph(run: saved_run.SavedRun, is_compiled: bool = False) -> ServingGraph:
    """Builds a run's network on one device, as evaluation does. is_compiled: whether XLA compiles it."""
    workload, (raw, is_multi_label) = run.workload.for_examples(run.examples), _looked_at(run.examples)
    with tf.Graph().as_default() as graph, tf.device(HOST):
        files, features = _inputs(raw)
        prepared = stream.prepared(workload, features)
        tower = Tower(0, HOST)
        outputs, first_outputs = network.trained_outputs(
            workload, prepared, run.dtype, Variables(), tower, Draws("serving"), is_compiled
        )
        gradients.forget_functions(graph)
        class_names = run.examples.class_names if network.are_of_classes(outputs, run.examples) else ()
        last = towers.last_activation(first_outputs)  # of a network whose loss takes probabilities
        is_probable = last is not None and last.type == ("Sigmoid" if is_multi_label else "Softmax")
        return ServingGraph(
            graph=graph,
            files=files,
            features=_named(features, "features"),
            outputs=(
                _class_outputs(outputs, class_names, is_multi_label, is_probable)
                if class_names
                else _named(outputs, "outputs")
            ),
            class_names=class_names,
            is_multi_label=is_multi_label,
            is_probable=is_probable,
            restored=network.variables_to_restore(run.moving_average_decay),
        )


def open_run(
    options: RunOptions, workload: Workload | None = None, jit_compile: str = "never"
) -> tuple[ServingGraph, v1.Session]:
    """Opens a session with the network of a run's checkpoint, on the CPU; the caller closes it. Finds its workload
    if it is None. Raises RunError for no run, no checkpoint, or one of another network."""
    placed = devices.place(DeviceOptions(device="cpu"))
    return opened(saved_run.read(options, workload), placed, placed.compiles(jit_compile))


def opened(
    run: saved_run.SavedRun, placed: devices.Devices, is_compiled: bool = False
) -> tuple[ServingGraph, v1.Session]:
    """Opens a session with the network of a run; as open_run."""
    built = serving_graph(run, is_compiled)
    if is_compiled:
        xla.prepare(built.graph, placed.session_config)
    return built, run.session(built.graph, built.restored, placed)


def _looked_at(examples: Examples) -> tuple[Tensors, bool]:
    """Returns the features of a symbolic batch of one, in a graph of its own, and whether its labels are of several
    classes at once, [batch, classes]."""
    with tf.Graph().as_default():
        features, labels = examples.symbolic_batch()
        labels = Weighted.of(labels).labels
        return features, tf.is_tensor(labels) and labels.shape.rank == 2


def _inputs(raw: Tensors) -> tuple[tf.Tensor | None, Tensors]:
    """Returns (files, features) as of ServingGraph, the features unnamed and, if they are not fed, made from files."""
    if tf.is_tensor(raw) and raw.dtype == tf.uint8 and raw.shape.rank == 4 and raw.shape[-1] in (1, 3):
        files, size = v1.placeholder(tf.string, [None], name="files"), raw.shape[1:]
        images = tf.map_fn(lambda contents: _decoded(contents, *size), files, fn_output_signature=tf.uint8)
        return files, v1.placeholder_with_default(images, [None, *size], name="features")
    features = [v1.placeholder(tensor.dtype, [None, *tensor.shape[1:]]) for tensor in tf.nest.flatten(raw)]
    return None, tf.nest.pack_sequence_as(raw, features)


def _decoded(contents: tf.Tensor, height: int, width: int, channels: int) -> tf.Tensor:
    """Decodes an image file in TensorFlow, which a SavedModel needs: uint8 [height, width, channels].

    As data/decoding.py does with Pillow, to 1 of 255, but it leaves the image as the camera held it (no EXIF).
    """
    image = tf.cond(
        tf.io.is_jpeg(contents),
        lambda: tf.io.decode_jpeg(contents, channels=3, dct_method="INTEGER_ACCURATE"),  # as Pillow, to the bit
        lambda: tf.io.decode_image(contents, channels=3, expand_animations=False),
    )
    image = tf.ensure_shape(image, [None, None, 3])  # not decoded to grey at once: TensorFlow does not do so from CMYK
    image = image if channels == 3 else tf.image.rgb_to_grayscale(image)
    return tf.saturate_cast(tf.round(tf.image.resize(image, [height, width], antialias=True)), tf.uint8)


def _named(tensors: Tensors, name: str) -> Named:
    """Names the tensors of a structure in tf.nest.flatten's order: dicts by key, a single one NAME, several NAME_0,
    ..."""
    flat = tf.nest.flatten(tensors)
    if isinstance(tensors, Mapping) and len(tensors) == len(flat):
        return dict(zip(map(str, sorted(tensors)), flat, strict=True))
    return {name: flat[0]} if len(flat) == 1 else {f"{name}_{i}": tensor for i, tensor in enumerate(flat)}


def _class_outputs(outputs: tf.Tensor, class_names: tuple[str, ...], is_multi_label: bool, is_probable: bool) -> Named:
    names = tf.constant(class_names)
    to_logits, to_probabilities = (_logit, tf.sigmoid) if is_multi_label else (tf.math.log, tf.nn.softmax)
    by_name = {
        "logits": to_logits(outputs) if is_probable else outputs,
        "probabilities": outputs if is_probable else to_probabilities(outputs),
        "classes": tf.gather(names, tf.argmax(outputs, axis=-1)),
        "all_classes": tf.tile(names[tf.newaxis], [tf.shape(outputs)[0], 1]),
    }
    return {name: value for name, value in by_name.items() if name != "classes" or not is_multi_label}


def _logit(probabilities: tf.Tensor) -> tf.Tensor:
    return tf.math.log(probabilities) - tf.math.log1p(-probabilities)
