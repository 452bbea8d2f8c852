"""Batch statistics: from the towers' to one mean for each moving variable."""

import itertools
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.graph.context import Statistic


def check_same(tower_statistics: list[list[Statistic]], original: Callable[[tf.Variable], tf.Variable]) -> None:
    """Refuses towers that noted different statistics.

    Args:
      tower_statistics: over towers, its layers' statistics.
      original: variable -> the original of a copy.

    Raises:
      GraphError: some towers noted a statistic that others did not.
    """
    names = [[original(statistic.moving).op.name for statistic in noted] for noted in tower_statistics]
    for others in names:
        if others != names[0]:
            name = next(pair[0] or pair[1] for pair in itertools.zip_longest(others, names[0]) if pair[0] != pair[1])
            raise errors.GraphError(
                f"{name} has {sum(noted.count(name) for noted in names)} batch statistics from {len(names)} towers. "
                "Every tower must call its layer as often as the others."
            )


def values(noted: list[Statistic]) -> list[tf.Tensor]:
    """Returns the values of one tower that are averaged."""
    return [statistic.value for statistic in noted if statistic.is_mean]


def with_values(noted: list[Statistic], given: list[tf.Tensor]) -> list[Statistic]:
    """Replaces one tower's `values` by other tensors."""
    remaining = iter(given)
    return [each._replace(value=next(remaining)) if each.is_mean else each for each in noted]


def with_means(noted: list[Statistic], means: list[tf.Tensor]) -> list[Statistic]:
    """Replaces one tower's `values` by means over towers: one statistic per moving variable, the mean of its calls."""
    by_variable = {}
    for statistic in with_values(noted, means):
        by_variable.setdefault(statistic.moving.ref(), []).append(statistic)
    return [_mean_of_calls(calls) for calls in by_variable.values()]


def _mean_of_calls(calls: list[Statistic]) -> Statistic:
    first = calls[0]
    if len(calls) == 1 or not first.is_mean:
        return first
    return first._replace(value=tf.add_n([statistic.value for statistic in calls]) / len(calls))
