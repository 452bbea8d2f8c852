"""Confusions of classes: a whole matrix, or for many classes only the most frequent ones."""

import collections
import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

_MOST_CLASSES = 200  # in a whole matrix
_MOST_COUNTED = 1 << 18  # pairs of classes counted at a time
_MOST_KEPT = 100


@dataclasses.dataclass(frozen=True)
class Confused:
    """The number of examples of one class that were taken for another."""

    true: str
    predicted: str
    count: int


class Confusions:
    """Counts pairs of a true and a predicted class, in little memory for any number of classes.

    With more than 200 classes it counts mistakes only. With more than a quarter of a million different pairs it forgets
    the rarest on the way, and counts may come out too small.
    """

    def __init__(self, class_names: tuple[str, ...]):
        self._names, self._pairs = class_names, collections.Counter()

    def add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        """Counts examples, by their classes, int64 [n] each."""
        labels, predictions = labels.ravel(), predictions.ravel()
        if len(self._names) > _MOST_CLASSES:
            wrong = labels != predictions
            labels, predictions = labels[wrong], predictions[wrong]
        self._pairs.update(zip(labels.tolist(), predictions.tolist(), strict=True))
        if len(self._pairs) > _MOST_COUNTED:
            self._pairs = collections.Counter(dict(_most_frequent(self._pairs.items(), _MOST_COUNTED // 2)))

    def matrix(self) -> list[list[int]] | None:
        """Returns counts by [true class][predicted class]; None if there are no classes, too many, or no names."""
        classes = len(self._names)
        if not 0 < classes <= _MOST_CLASSES or not all(0 <= i < classes and 0 <= j < classes for i, j in self._pairs):
            return None
        return [[self._pairs[i, j] for j in range(classes)] for i in range(classes)]

    def most_frequent(self) -> tuple[Confused, ...]:
        """Returns the most frequent mistakes, at most a hundred; among equals those of the first classes."""
        mistakes = ((pair, count) for pair, count in self._pairs.items() if pair[0] != pair[1])
        return tuple(
            Confused(self._name(i), self._name(j), count) for (i, j), count in _most_frequent(mistakes, _MOST_KEPT)
        )

    def _name(self, index: int) -> str:
        return self._names[index] if 0 <= index < len(self._names) else f"class {index}"


def _most_frequent(pairs: Iterable, most: int) -> list:
    return heapq.nsmallest(most, pairs, key=lambda item: (-item[1], item[0]))
