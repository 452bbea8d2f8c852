"""The check of training examples for likely mistakes before a new run."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph import step_failures, stream
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1

SAMPLE = 500  # examples in the sample
_BATCH = 50
_UNBALANCED = 10  # largest class / smallest class
_ENOUGH = 20  # expected examples of a class in a sample from which its share means something
_LARGE = 1000  # larger preprocessed values are hardly meant; images from 0 to 255 are
_FEW_COLUMNS = 100


def warnings(workload: Workload, examples: Examples) -> list[str]:
    """Warns of missing or unbalanced classes, labels that are all the same, a sorted order, and features that are
    constant, not finite or very large.

    Looks at all labels if they are at hand, and at SAMPLE examples as evaluation sees them: without augmentation, but
    with the workload's `prepare`. The order matters only for examples in their own order; the others are shuffled as a
    whole.

    Raises:
      DataError: a label that is no class, one class only, or examples that cannot be read.
    """
    features, labels = _look_at(workload, examples)
    count, lines = len(tf.nest.flatten(labels)[0]), []
    if examples.class_names:
        known = labels if examples.labels is None else examples.labels
        lines += _about_classes(known, examples, "all" if examples.labels is not None else f"the {count} looked at")
        if examples.elements:
            lines += _about_order(labels)
    elif isinstance(labels, np.ndarray):
        lines += _about_numbers(labels, count)
    for values in tf.nest.flatten(features):
        lines += _about_features(values)
    return [f"*** {examples.name}: {line}" for line in lines]


def _look_at(workload: Workload, examples: Examples) -> tuple:
    """Returns (features, labels) of the sample, joined."""
    sample, parts, config = examples.sample(SAMPLE), [], v1.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # takes longer than what it would speed up
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        batches, [counted] = stream.evaluation_stream(workload, sample, _BATCH, 1)
        with v1.Session(config=config) as session:
            session.run([v1.tables_initializer(), batches.initializer])
            named = step_failures.named(examples.name, workload.name, may_end=True)
            with contextlib.suppress(tf.errors.OutOfRangeError), named:
                while True:
                    parts.append(session.run((batches.batches[0], counted)))
    if not parts:
        raise errors.DataError(f"{examples.name}: its dataset gives no examples.")
    joined = [tf.nest.map_structure(lambda tensor, kept=kept: tensor[kept], batch) for batch, kept in parts]
    return tf.nest.map_structure(lambda *tensors: np.concatenate(tensors), *joined)


def of_all_labels(examples: Examples) -> list[str]:
    """Warns of classes only, from the labels of all examples if they are at hand; raises as `warnings`."""
    if examples.labels is None or not examples.class_names:
        return []
    return [f"*** {examples.name}: {line}" for line in _about_classes(examples.labels, examples, "all")]


def _about_classes(labels: np.ndarray, examples: Examples, which: str) -> Iterator[str]:
    names = examples.class_names
    if len(names) == 1:
        raise errors.DataError(
            f"{examples.name}: there is one class only, {names[0]}, and nothing to tell apart. Give examples of two "
            "classes at least; labels that are no classes need no class_names. --nocheck_data trains all the same."
        )
    examples.check_labels(labels)
    counts = np.bincount(labels, minlength=len(names))
    is_one = counts.max() == len(labels) >= _ENOUGH
    if examples.labels is None and len(labels) < _ENOUGH * len(names) and not is_one:
        return
    order = " Does the dataset come sorted by class?" if examples.elements else ""
    missing = [names[i] for i in np.flatnonzero(counts == 0)]
    if len(missing) == len(names) - 1:
        yield f"every example is of class {names[counts.argmax()]} (of {which}): there is nothing to tell apart.{order}"
    elif missing:
        shown = f"{', '.join(missing[:5])}{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}"
        yield f"no example is of class {shown} (of {which}).{order}"
    most, least = int(counts.argmax()), int(np.where(counts, counts, counts.max()).argmin())
    if counts[most] >= _UNBALANCED * counts[least]:
        yield (
            f"classes are badly unbalanced: {counts[most]} examples of {names[most]}, {counts[least]} of "
            f"{names[least]} (of {which}). Always answering {names[most]} has a precision of "
            f"{counts[most] / counts.sum():.2f}."
        )


def _about_numbers(labels: np.ndarray, count: int) -> Iterator[str]:
    """Warns if labels that are no classes do not differ."""
    if count > 1 and labels.dtype != object and (labels == labels[0]).all():
        shown = np.array2string(labels[0], threshold=5).replace("\n", "")
        yield f"all {count} examples looked at have the same label ({shown}): there is nothing to learn."


def _about_order(labels: np.ndarray) -> Iterator[str]:
    """Compares the changes of class from one example to the next with those of a shuffled order."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    expected = (len(labels) - 1) * (1 - np.sum(shares**2))
    if expected > _ENOUGH and np.sum(labels[1:] != labels[:-1]) < expected / 5:
        yield "examples come nearly sorted by class, and are trained on in this order. Shuffle them with .shuffle()."


def _about_features(values: np.ndarray) -> Iterator[str]:
    if not np.issubdtype(values.dtype, np.floating):
        return
    rows = values.reshape(len(values), -1).astype(np.float64)
    finite = np.isfinite(rows)
    if not finite.all():
        yield f"{np.sum(~finite.all(axis=1))} of {len(rows)} examples looked at have features that are not finite."
    if len(rows) > 1 and rows.size:
        constant = np.flatnonzero((rows == rows[0]).all(axis=0))
        if len(constant) == rows.shape[1]:
            yield f"all {len(rows)} examples looked at have the same features."
        elif len(constant) and values.ndim == 2 and rows.shape[1] <= _FEW_COLUMNS:
            shown = ", ".join(map(str, constant[:10]))
            yield f"features {shown} are the same in all {len(rows)} examples looked at (columns count from 0)."
    least, most = np.min(rows, initial=0, where=finite), np.max(rows, initial=0, where=finite)
    if max(-least, most) > _LARGE:
        yield f"features reach the network with values from {least:g} to {most:g}. Scale them in `prepare`."
