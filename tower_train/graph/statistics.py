"""From the towers' batch statistics to one update of the moving ones, in which no tower counts more than another."""

import tensorflow as tf

from tower_train import errors
from tower_train.graph.mirrors import Copies
from tower_train.layers import STATISTICS, Statistic

v1 = tf.compat.v1


def average_statistics(num_towers: int, copies: Copies) -> list[list[Statistic]]:
    """Over copies, the mean over its towers of what they noted in the collection STATISTICS, one a moving variable.

    Raises:
      GraphError: some towers noted something that others did not.
    """
    by_variable: dict[str, list[Statistic]] = {}
    for statistic in v1.get_collection(STATISTICS):
        by_variable.setdefault(copies.original(statistic.moving).op.name, []).append(statistic)
    averaged = [[] for _ in range(len(copies))]
    for name, found in by_variable.items():
        if len(found) % num_towers:
            raise errors.GraphError(
                f"{name} has {len(found)} batch statistics from {num_towers} towers. Every tower must call its "
                "layer as often as the others."
            )
        each = len(found) // len(copies)  # towers note one after the other, and those of one copy follow each other
        for i, device in enumerate(copies.devices):
            first, *_ = own = found[i * each : (i + 1) * each]
            if first.is_mean:
                with tf.device(device), v1.name_scope("average_statistics"):
                    first = first._replace(value=tf.add_n([statistic.value for statistic in own]) / each)
            averaged[i].append(first)
    return averaged


def update_moving(statistics: list[Statistic]) -> tf.Operation:
    """moving = momentum * moving + (1 - momentum) * value, for each."""
    return tf.group(
        *[
            moving.assign_sub((1 - momentum) * (moving - value)) if momentum else moving.assign(value)
            for moving, value, momentum, _ in statistics
        ]
    )
