"""Looks at a new run's examples: warns of likely mistakes, and draws examples as the network gets them."""

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration
from tower_train.data import example_images
from tower_train.examples import Examples, Mixed, Tensors, Weighted, count_classes
from tower_train.graph import step_failures, summaries
from tower_train.graph.layout import Layout
from tower_train.graph.stream import training_stream
from tower_train.inference.evaluation_graph import evaluation_stream
from tower_train.workload import Workload

v1 = tf.compat.v1

SAMPLE = 500  # examples in the sample
_BATCH = 50
_MOST_NAMES = 5  # in a line
_ENOUGH = 20  # expected examples of a class in a sample from which its absence means something


def look(workload: Workload, examples: Examples, seed: int) -> tuple[list[str], bytes | None]:
    """Warns of missing classes, and of features that are not finite; draws the first examples.

    Looks at all labels if they are at hand, and at SAMPLE examples as evaluation sees them.

    Returns:
      The warnings, and a PNG of examples as the network gets them in training; None if they are no images.

    Raises:
      DataError: a label that is no class, one class only, or examples that cannot be read.
    """
    (features, labels), first = _look_at(workload, examples, seed)
    lines = list(_about_classes(Weighted.of(labels).labels, examples)) if examples.class_names else []
    parts = features if isinstance(features, dict) else {"": features}
    for part in sorted(parts):
        for values in tf.nest.flatten(parts[part]):
            lines += _about_features(values, examples.name, f"features {part}".strip())
    return lines, example_images.draw(*first, examples.class_names) if first else None


def _look_at(workload: Workload, examples: Examples, seed: int) -> tuple[tuple, tuple | None]:
    """Returns (features, labels) of the sample, joined; and (images, labels) of the first batch, if there are some."""
    sample, parts, config = examples.sample(SAMPLE), [], v1.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # takes longer than what it would speed up
    with tf.Graph().as_default(), tf.device("/cpu:0"):  # GPUs belong to the training's session
        stream = evaluation_stream(workload, sample, _BATCH, 1)
        images, trained, first = _image(stream.batches[0]), None, None
        if images is not None:
            trained = training_stream(workload, examples, seed, tf.zeros([], tf.int64), Layout(example_images.IMAGES))
            images = _image(trained.batches[0][0])
        with v1.Session(config=config) as session:
            session.run([v1.tables_initializer(), stream.initializer])
            explained = functools.partial(step_failures.explained, sample, workload.name, may_end=True)
            with contextlib.suppress(tf.errors.OutOfRangeError), explained():
                while True:
                    parts.append(session.run((stream.batches[0], stream.counted[0])))
            if images is not None:
                with contextlib.suppress(tf.errors.OutOfRangeError), explained():
                    session.run(trained.initializer)
                    first = session.run((images, _shown(trained.batches[0][1], len(examples.class_names))))
    if not parts:
        raise errors.DataError(f"{examples.name}: its dataset gives no examples.")
    joined = [tf.nest.map_structure(lambda tensor, kept=kept: tensor[kept], batch) for batch, kept in parts]
    return tf.nest.map_structure(lambda *tensors: np.concatenate(tensors), *joined), first


def _shown(labels: Tensors | Weighted | Mixed, num_classes: int) -> tf.Tensor:
    """Returns the first of the labels, or the shares of all classes in mixed examples."""
    if not isinstance(labels, Mixed):
        return tf.nest.flatten(labels)[0]
    if not num_classes:
        return labels.first.labels
    return tf.add_n([tf.one_hot(part.labels, num_classes) * part.weights[:, tf.newaxis] for part in labels])


def _image(features: Tensors) -> tf.Tensor | None:
    """Returns the first feature that is a batch of images."""
    return next(filter(summaries.is_image, tf.nest.flatten(features)), None)


def _about_classes(labels: np.ndarray, examples: Examples) -> Iterator[str]:
    """Warns of classes without an example, by all labels if they are at hand, else by those of the sample."""
    names, is_sample = examples.class_names, examples.labels is None
    if not is_sample:
        labels = examples.labels
    if len(names) == 1 and labels.ndim == 1:
        raise errors.DataError(
            f"{examples.name}: there is one class only, {names[0]}, and nothing to tell apart. Give examples of two "
            "classes at least; labels that are no classes need no class_names. --nocheck_data trains all the same."
        )
    examples.check_labels(labels)
    missing = [names[i] for i in np.flatnonzero(count_classes(labels, len(names)) == 0)]
    # a data set that comes sorted shows one class only
    is_one = len(missing) == len(names) - 1 and len(labels) >= _ENOUGH
    if missing and (is_one or not is_sample or len(labels) >= _ENOUGH * len(names)):
        which = f"the {len(labels)} looked at" if is_sample else "all"
        order = " Does the dataset come sorted by class?" if examples.elements else ""
        yield f"*** {examples.name}: no example is of class {enumeration(missing, _MOST_NAMES)} (of {which}).{order}"


def _about_features(values: np.ndarray, name: str, what: str) -> Iterator[str]:
    if not np.issubdtype(values.dtype, np.floating):
        return
    rows = values.reshape(len(values), -1)
    bad = np.sum(~np.isfinite(rows).all(axis=1))
    if bad:
        yield f"*** {name}: {bad} of {len(rows)} examples looked at have {what} that are not finite (NaN or inf)."
