"""Weights of classes in the loss of the training: --class_weight."""

import math

import numpy as np

from tower_train import errors
from tower_train.console import enumeration
from tower_train.examples import Examples

BALANCED = "balanced"
_MOST_NAMES = 10  # in a line


def parse(text: str | None, examples: Examples) -> np.ndarray | None:
    """Returns the weights of classes of --class_weight, float64 [classes]; None without it.

    `balanced` is n / (k * count) for n examples of k classes, as in scikit-learn's compute_class_weight (after King and
    Zeng 2001, "Logistic regression in rare events data"). Classes without an example, and those not in a list of
    CLASS:WEIGHT, have weight 1. ConfigError if the classes are not known, or the list has others, or negative weights.
    """
    if text is None:
        return None
    names, labels = examples.class_names, examples.labels
    if labels is None and (text == BALANCED or not names):
        raise errors.ConfigError(
            f"--class_weight={text}: the classes of {examples.name} are not at hand before they are read. Give their "
            "labels as Examples(labels=), or class_names and weights such as --class_weight=0:1,1:2.5."
        )
    if labels is not None and labels.ndim > 1:
        raise errors.ConfigError(
            f"--class_weight={text}: examples of {examples.name} are of several classes at once. Weigh these in a loss "
            "of the workload."
        )
    labels = np.asarray([] if labels is None else labels, np.int64)  # bincount takes no uint64
    if labels.min(initial=0) < 0:
        raise errors.ConfigError(
            f"--class_weight={text}: {examples.name} has the label {labels.min()}. Classes are numbered from 0 on: "
            "renumber the labels, or weigh examples by tower_train.Weighted."
        )
    counts = np.bincount(labels, minlength=len(names))
    weights = np.ones(len(counts))
    if text == BALANCED:
        # a class without examples would weigh infinitely much
        there = counts > 0
        weights[there] = len(labels) / (there.sum() * counts[there])
        return weights
    for part in text.split(","):
        # from the right: a name may have a colon
        name, _, weight = part.rpartition(":")
        index = names.index(name) if name in names else int(name) if name.isdecimal() else len(weights)
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if index >= len(weights) or not 0 <= value < math.inf:
            classes = enumeration(names or [str(i) for i in range(len(weights))], _MOST_NAMES)
            raise errors.ConfigError(
                f"--class_weight={text}: {part!r} must be CLASS:WEIGHT, a class of {examples.name} by name or number, "
                f"and a weight of at least 0; or give {BALANCED}. The classes are {classes}."
            )
        weights[index] = value
    return weights
