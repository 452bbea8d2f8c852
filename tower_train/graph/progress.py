"""Counters of the current step, which another thread can read while it is stuck."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

v1 = tf.compat.v1
INPUT = "input"


def count_progress(
    parts: Mapping[str, Sequence[tf.Tensor | tf.Operation]],
) -> tuple[list[tf.Operation], dict[str, tf.Tensor]]:
    """Counts, since the session began, the steps in which each part is done.

    Args:
      parts: {INPUT or a tower's name: computed once it has arrived or is done}.

    Returns:
      Ops to run with each step, and {part: int64 scalar, the steps so far}.
    """
    ops, counts = [], {}
    for name, arrived in parts.items():
        counter = v1.get_variable(
            f"progress/{name}",
            [],
            tf.int64,
            v1.zeros_initializer(),
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )
        with tf.control_dependencies([tf.group(*arrived)]):  # one message from each device
            ops.append(counter.assign_add(1).op)
        counts[name] = counter.read_value()
    return ops, counts
