"""Lookahead: slow weights that follow the trained ones every few steps, which are then set to them."""

from collections.abc import Sequence

import tensorflow as tf

v1 = tf.compat.v1


class Lookahead:
    """Zhang et al. 2019, "Lookahead optimizer: k steps forward, 1 step back", algorithm 1, with 1 - alpha = d:

        slow = d * slow + (1 - d) * fast
        fast = slow

    after every --lookahead_every_steps steps, with d = --lookahead_decay * progress ** --lookahead_ramp, progress being
    the done share of the training after the step (a rising d is that of Jordan 2024, arXiv 2404.00498). After the
    training's last step the fast weights become the slow ones.

    The slow weights begin as the fast ones at the first of these updates, since the initial values are not worth
    keeping. They are variables (NAME/Lookahead), and so is the number of updates. A run that is given more steps goes
    on from its slow weights, which are its weights then. A step that is skipped as not finite has no update.

    Attributes:
      counts: (counter, int64 scalar to add) of a step that was not skipped.
    """

    def __init__(self, every_steps: int, decay: float, ramp: float, step: tf.Tensor, last_step: int, done: tf.Tensor):
        """Creates the counter of updates.

        Args:
          every_steps, decay, ramp: --lookahead_every_steps, --lookahead_decay, --lookahead_ramp.
          step: int64 scalar, the step's number, from 1.
          last_step: of the training.
          done: float64 scalar, the done share of the training after the step.
        """
        updates = v1.get_variable("lookahead/updates", [], tf.int64, v1.zeros_initializer(), trainable=False)
        with v1.name_scope("lookahead"):
            is_due = tf.equal(step % every_steps, 0)
            self._is_now = tf.logical_or(is_due, tf.equal(step, last_step))
            share = tf.where(is_due, decay * done**ramp, tf.ones_like(done))
            self._decay = tf.where(updates.read_value() > 0, share, tf.zeros_like(done))
            self.counts = [(updates, tf.cast(self._is_now, tf.int64))]

    def apply(self, variables: Sequence[tf.Variable]) -> tf.Operation:
        """Applies lookahead to one copy of the floating-point variables, after the rest of its update.

        Steps without an update do not touch the weights.
        """
        with tf.init_scope():  # outside of the step's conditional
            slow = [
                v1.get_variable(f"{v.op.name}/Lookahead", v.shape, v.dtype, v1.zeros_initializer(), trainable=False)
                for v in variables
            ]

        def update():
            assigned = []
            for kept, moved in zip(slow, variables, strict=True):
                decay, share = (tf.cast(value, moved.dtype) for value in (self._decay, 1 - self._decay))
                value = decay * kept.read_value() + share * moved.read_value()
                assigned += [v.assign(value, read_value=False) for v in (kept, moved)]
            with tf.control_dependencies(assigned):
                return tf.constant(True)

        return tf.cond(self._is_now, update, lambda: tf.constant(False), name="lookahead").op
