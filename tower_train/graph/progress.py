"""Counters of the current step, which another thread can read while it is stuck."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train.graph.gradients import GradientsAndVariables

v1 = tf.compat.v1
INPUT = "input"


def count_progress(
    input_arrivals: Sequence[tf.Tensor | tf.Operation],
    tower_losses: Sequence[tf.Tensor],
    tower_grads: Sequence[GradientsAndVariables],
) -> tuple[list[tf.Operation], dict[str, tf.Tensor]]:
    """Counts, since the session began, the steps whose input has arrived and those that each tower has done.

    Args:
      input_arrivals: available once a step's input is.
      tower_losses, tower_grads: over towers.

    Returns:
      Ops to run with each step, and {'input' or the tower's name: int64 scalar, the steps so far}.
    """
    arrivals = {INPUT: list(input_arrivals)}
    for i, (loss, grads) in enumerate(zip(tower_losses, tower_grads, strict=True)):
        arrivals[f"tower_{i}"] = [loss, *(grad.op for grad, _ in grads if grad is not None)]
    ops, counts = [], {}
    for name, arrived in arrivals.items():
        counter = v1.get_variable(
            f"progress/{name}", [], tf.int64, v1.zeros_initializer(), trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )  # fmt: skip
        with tf.control_dependencies([tf.group(*arrived)]):  # one message from each device
            ops.append(counter.assign_add(1).op)
        counts[name] = counter.read_value()
    return ops, counts
