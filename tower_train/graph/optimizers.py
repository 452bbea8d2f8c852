"""The optimizers by their names, and Muon: momentum made orthogonal, so that a step moves all directions of a layer
alike."""

import tensorflow as tf

from tower_train.config import Config
from tower_train.graph.context import ParamGroup
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.schedule import group_rate

v1 = tf.compat.v1

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Jordan's Newton-Schulz iteration: singular values to about 1, quickly


def make_optimizer(
    config: Config, rate: tf.Tensor, epochs_seen: tf.Tensor, group: ParamGroup, grads: GradientsAndVariables
) -> tuple[v1.train.Optimizer, tf.Tensor | None]:
    """Returns a group's optimizer, and the share by which a step decays its weights, None for none.

    config: whole, as five of its options make an optimizer; rate, epochs_seen: of the step, float64 scalars.
    """
    is_double = any(variable.dtype.base_dtype.real_dtype == tf.float64 for _, variable in grads)
    with tf.device(HOST):  # which has done with it long before the devices need it
        rate = tf.cast(group_rate(rate, epochs_seen, group), tf.float64 if is_double else tf.float32)
        decay = rate * config.weight_decay if config.weight_decay else None
    exact = rate.dtype.as_numpy_dtype  # TensorFlow would round Python's numbers to float32
    momentum = exact(config.momentum if group.momentum is None else group.momentum)
    if config.optimizer == "sgd":
        return v1.train.GradientDescentOptimizer(rate), decay
    if config.optimizer in ("adam", "adamw"):  # its decay is in update.py, as every optimizer's
        return v1.train.AdamOptimizer(rate, exact(0.9), exact(0.999), exact(1e-8)), decay
    if config.optimizer == "muon" and group.muon:
        return Muon(rate, momentum, config.nesterov, config.muon_iterations), decay
    return v1.train.MomentumOptimizer(rate, momentum, use_nesterov=config.nesterov), decay


class Muon(v1.train.MomentumOptimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for variables of rank 2 and more, momentum
    for the others and for sparse gradients.

    The filters of a convolution [height, width, in, out] are the matrix [height * width * in, out]. Of the momentum M
    of a matrix [in, out], U V^T of its singular value decomposition U S V^T is subtracted times the learning rate and
    sqrt(max(1, out / in)); the iteration approximates it: after five its singular values lie within 0.7 and 1.2.
    """

    def __init__(self, learning_rate: tf.Tensor, momentum: float, nesterov: bool, iterations: int):
        super().__init__(learning_rate, momentum, use_nesterov=nesterov)
        self._iterations = iterations

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        is_matrix = [var.shape.rank > 1 and not isinstance(grad, tf.IndexedSlices) for grad, var in grads_and_vars]
        others = [pair for pair, matrix in zip(grads_and_vars, is_matrix, strict=True) if not matrix]
        with tf.init_scope():
            self._create_slots([var for _, var in grads_and_vars])
        self._prepare()
        with v1.name_scope(name, self.get_name()):
            moved = [self._move(*pair) for pair, matrix in zip(grads_and_vars, is_matrix, strict=True) if matrix]
            if others:
                moved.append(super().apply_gradients(others, global_step))
            return tf.group(*moved)

    def _move(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation:
        """Moves a matrix, and its momentum."""  # nothing is read after it was written, which would split XLA's cluster
        momentum = tf.cast(self._momentum_tensor, grad.dtype)
        slot = self.get_slot(var, "momentum")
        velocity = momentum * slot + grad
        direction = grad + momentum * velocity if self._use_nesterov else velocity
        inputs, outputs = var.shape.num_elements() // var.shape[-1], var.shape[-1]
        matrix = orthogonal(tf.reshape(direction, [inputs, outputs]), self._iterations)
        rate = tf.cast(self._learning_rate_tensor, grad.dtype) * max(1, outputs / inputs) ** 0.5
        value = var - rate * tf.reshape(matrix, var.shape)
        value = var.constraint(value) if var.constraint else value
        return tf.group(slot.assign(velocity, read_value=False), var.assign(value, read_value=False))


def orthogonal(matrix: tf.Tensor, iterations: int) -> tf.Tensor:
    """Brings the singular values of a matrix X near 1 and keeps its singular vectors.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X of norm 1.

    Args:
      matrix: [m, n], floating point.
      iterations: of Newton and Schulz, with Jordan's coefficients.

    Returns:
      The same shape and dtype; zeros for zeros.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]  # the product is then of the smaller side
    x = tf.transpose(matrix) if is_tall else matrix
    x /= tf.norm(x) + 1e-7  # then all singular values are at most 1, where the iteration converges
    for _ in range(iterations):
        squared = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * squared + c * tf.matmul(squared, squared), x)
    return tf.transpose(x) if is_tall else x
