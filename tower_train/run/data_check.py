"""The check of training examples for likely mistakes before a new run."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration
from tower_train.examples import Weighted
from tower_train.graph import step_failures
from tower_train.inference.evaluation_graph import evaluation_stream
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1

SAMPLE = 500  # examples in the sample
_BATCH = 50
_MOST_NAMES = 5  # in a line
_ENOUGH = 20  # expected examples of a class in a sample from which its absence means something


def warnings(workload: Workload, examples: Examples) -> list[str]:
    """Warns of missing classes, and of features that are all the same or not finite.

    Looks at all labels if they are at hand, and at SAMPLE examples as evaluation sees them: without augmentation, but
    with the workload's `prepare`.

    Raises:
      DataError: a label that is no class, one class only, or examples that cannot be read.
    """
    features, labels = _look_at(workload, examples)
    lines = list(_about_classes(Weighted.of(labels).labels, examples)) if examples.class_names else []
    for values in tf.nest.flatten(features):
        lines += _about_features(values, examples.name)
    return lines


def _look_at(workload: Workload, examples: Examples) -> tuple:
    """Returns (features, labels) of the sample, joined."""
    sample, parts, config = examples.sample(SAMPLE), [], v1.ConfigProto(device_count={"GPU": 0})
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # takes longer than what it would speed up
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        stream = evaluation_stream(workload, sample, _BATCH, 1)
        with v1.Session(config=config) as session:
            session.run([v1.tables_initializer(), stream.initializer])
            named = step_failures.named(examples.name, workload.name, may_end=True)
            with contextlib.suppress(tf.errors.OutOfRangeError), named:
                while True:
                    parts.append(session.run((stream.batches[0], stream.counted[0])))
    if not parts:
        raise errors.DataError(f"{examples.name}: its dataset gives no examples.")
    joined = [tf.nest.map_structure(lambda tensor, kept=kept: tensor[kept], batch) for batch, kept in parts]
    return tf.nest.map_structure(lambda *tensors: np.concatenate(tensors), *joined)


def _about_classes(labels: np.ndarray, examples: Examples) -> Iterator[str]:
    """Warns of classes without an example, by all labels if they are at hand, else by those of the sample."""
    names, is_sample = examples.class_names, examples.labels is None
    if not is_sample:
        labels = examples.labels
    if len(names) == 1:
        raise errors.DataError(
            f"{examples.name}: there is one class only, {names[0]}, and nothing to tell apart. Give examples of two "
            "classes at least; labels that are no classes need no class_names. --nocheck_data trains all the same."
        )
    examples.check_labels(labels)
    missing = [names[i] for i in np.flatnonzero(np.bincount(labels, minlength=len(names)) == 0)]
    is_one = len(missing) == len(names) - 1 and len(labels) >= _ENOUGH
    if missing and (is_one or not is_sample or len(labels) >= _ENOUGH * len(names)):
        which = f"the {len(labels)} looked at" if is_sample else "all"
        order = " Does the dataset come sorted by class?" if examples.elements else ""
        yield f"*** {examples.name}: no example is of class {enumeration(missing, _MOST_NAMES)} (of {which}).{order}"


def _about_features(values: np.ndarray, name: str) -> Iterator[str]:
    if not np.issubdtype(values.dtype, np.floating):
        return
    rows = values.reshape(len(values), -1)
    bad = np.sum(~np.isfinite(rows).all(axis=1))
    if bad:
        yield f"*** {name}: {bad} of {len(rows)} examples looked at have features that are not finite."
    if rows.size and len(rows) > 1 and (rows == rows[0]).all():
        yield f"*** {name}: all {len(rows)} examples looked at have the same features."
