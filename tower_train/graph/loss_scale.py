"""The loss scale of arithmetic in float16, in which many gradients would underflow.

The gradients of a loss times S are S times as large on their way through the network, and divided by S again where they
are float32. S is found during training (Micikevicius et al. 2018, "Mixed precision training", section 3.2), with the
numbers of Keras' LossScaleOptimizer: it begins at 2^15, doubles after 2,000 finite steps in a row, and halves at a step
whose gradients are not finite, which is skipped. Unlike there it stays within 1, below which it cannot be at fault, and
2^127, as it could not return from infinity.
"""

from collections.abc import Callable

import tensorflow as tf

from tower_train.graph.gradients import Gradient, GradientsAndVariables

v1 = tf.compat.v1

FIRST, LEAST, MOST = 2.0**15, 1.0, 2.0**127
STEPS_TO_DOUBLE = 2000


class LossScale:
    """The scale and the number of finite steps since its last change, both in the checkpoint; other dtypes have none.

    A step whose loss is finite and whose gradients are not has overflowed, as long as the scale can fall: it is skipped
    and counted. Loss and gradients are the means over all towers, so all workers decide alike.
    """

    def __init__(self, dtype: tf.DType):
        self._now = None
        if dtype == tf.float16:
            with v1.variable_scope("loss_scale"):
                self._scale = v1.get_variable("scale", [], tf.float32, v1.constant_initializer(FIRST), trainable=False)
                self._steps = v1.get_variable("finite_steps", [], tf.int64, v1.zeros_initializer(), trainable=False)
            self._now = self._scale.read_value()  # read before the gradients, changed after them

    def gradients(
        self, compute: Callable[[tf.Tensor], GradientsAndVariables], loss: tf.Tensor
    ) -> GradientsAndVariables:
        """Returns the gradients of a loss, which `compute` takes of the scaled one."""
        if self._now is None:
            return compute(loss)
        # before the network, as gradients underflow on their way
        scaled = compute(loss * tf.cast(self._now, loss.dtype))
        return [(_divided(gradient, self._now), variable) for gradient, variable in scaled]

    def after_update(self) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns (counter, amount to add) over its variables, for a step with an update."""
        if self._now is None:
            return []
        steps = self._steps.read_value()
        is_due = tf.equal(steps + 1, STEPS_TO_DOUBLE)  # growing tries whether a larger scale holds by now
        more = tf.where(is_due, tf.minimum(self._now, MOST - self._now), 0.0)
        return [(self._scale, more), (self._steps, tf.where(is_due, -steps, 1))]

    def without_update(self, loss: tf.Tensor, count: Callable[[], tf.Operation], skips: bool) -> tf.Operation:
        """Makes the op of a step with this loss that is not finite. count: makes the op that counts it; skips: whether
        it is skipped and counted, else it ends the run and changes nothing."""
        if self._now is None:
            return count() if skips else tf.no_op()
        overflowed = self._can_overflow(loss)

        def skip():
            scale = tf.where(overflowed, tf.maximum(self._now / 2, LEAST), self._now)
            changed = [self._scale.assign(scale, read_value=False), self._steps.assign(0, read_value=False)]
            with tf.control_dependencies([count(), *changed]):
                return tf.constant(True)

        return skip().op if skips else tf.cond(overflowed, skip, lambda: tf.constant(False)).op

    def report(self, loss: tf.Tensor, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns its fields of a StepReport, after a step with this loss and `finite` parts; none for no scale."""
        if self._now is None:
            return {}
        # the same question as in `without_update`, whose answer would not leave the conditional
        failed = tf.logical_not(tf.reduce_all(finite))
        return {"loss_scale": self._scale.read_value(), "overflowed": tf.logical_and(self._can_overflow(loss), failed)}

    def _can_overflow(self, loss: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(self._now > LEAST, tf.math.is_finite(loss))


def _divided(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, scale), gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else gradient / tf.cast(scale, gradient.dtype)
