"""An Estimator's towers update where, when and as often as the library does on one device."""

import numpy as np
import pytest
import tensorflow as tf
from regression import Runs, input_fn

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1


class Own(v1.train.Optimizer):
    """With an apply_gradients of its own, as BERT's and LAMB."""

    def __init__(self):
        super().__init__(False, "own")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        with v1.variable_scope("of_own", reuse=v1.AUTO_REUSE):
            [(grad, w)] = grads_and_vars
        with v1.variable_scope("of_own"):
            velocity = v1.get_variable("velocity", w.shape, w.dtype, v1.zeros_initializer())
        with tf.control_dependencies([velocity.assign(0.5 * velocity + grad)]):
            moves = [w.assign_sub(0.1 * velocity.read_value())]
        return tf.group(*moves, global_step.assign_add(1))


class Minimizes(v1.train.GradientDescentOptimizer):
    def minimize(self, loss, global_step=None, **_):
        return super().apply_gradients(self.compute_gradients(loss), global_step)


class Around(v1.train.Optimizer):
    def __init__(self, inner):
        super().__init__(False, "around")
        self.inner = inner

    def compute_gradients(self, *args, **kwargs):
        return self.inner.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        return self.inner.apply_gradients(*args, **kwargs)


def scaled(loss, w, step):
    """The first steps overflow, and are skipped; then the towers' gradients fit, and their sum would not."""
    scale = v1.mixed_precision.DynamicLossScale(initial_loss_scale=2.0**127, increment_period=3)
    optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.MomentumOptimizer(0.01, 0.5), scale)
    return optimizer.minimize(loss, step), loss


def by_example(loss, w, step):
    """Minimizes the examples' losses, not reduced: TensorFlow adds their gradients up."""
    return Minimizes(0.01).minimize(loss.op.inputs[0], step), loss


def unused(loss, w, step):
    v1.train.AdamOptimizer(0.1).minimize(loss)
    return v1.train.GradientDescentOptimizer(0.01).minimize(loss, step), loss


def twice(loss, w, step):
    """A gradient at the weights that the first update left."""
    first = v1.train.MomentumOptimizer(0.1, 0.5)
    with tf.control_dependencies([first.minimize(loss)]):
        again = tf.reduce_sum(tf.square(w.read_value()))
        moved = tf.reduce_mean(first.get_slot(w, "momentum"))
    with tf.control_dependencies([moved]):
        return v1.train.AdamOptimizer(0.01).apply_gradients([(2 * w, w)], step), again + moved


def in_a_scope(loss, w, step):
    with v1.variable_scope("training"), tf.name_scope("inner"):
        optimizer = v1.train.AdamOptimizer(0.1)
        op = optimizer.minimize(loss, step)
        assert optimizer.get_slot(w, "m") is not None and len(optimizer.variables()) == 4
        return op, loss


def computed(loss, w, step):
    """From the gradient: a penalty, noise of as many rows as a tower's examples, a norm, and an update by hand."""
    [slope] = tf.gradients(loss, w)
    [grad] = tf.gradients(loss + 0.1 * tf.reduce_sum(slope**2), [w])
    grad = tf.clip_by_norm(grad + tf.random.normal([12, 3], dtype=w.dtype, seed=3)[1], 0.4)
    with tf.control_dependencies([w.assign_sub(0.1 * grad)]):
        sgd = v1.train.GradientDescentOptimizer(0.1)
        return sgd.apply_gradients([(grad * tf.norm(slope), w)], step), loss


def trained(cls, towers, folder, update, steps=6, trainings=1):
    """Returns {name: value} of the variables after training on joined batches of 12."""

    def fn(features, labels, mode):
        dtype = tf.float32 if update is UPDATES["scaled"] else tf.float64  # in which the library has the scale
        w = v1.get_variable("w", [3], dtype, v1.ones_initializer())
        x, y = (tf.cast(each, dtype) for each in (features["x"], labels))
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) - y))
        train_op, loss = update(loss, w, v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf_estimator.RunConfig(num_gpus=towers, tf_random_seed=1, save_summary_steps=None)
    with compat.replaced(library.estimator, "Estimator", cls):  # by which it looks for overridden members
        estimator = cls(fn, str(folder), config)
    for i in range(trainings):  # later ones go on from the checkpoint
        count = steps // trainings * towers
        batches = lambda: input_fn(12 // towers, epochs=None).skip(i * count).take(count)  # noqa: B023, E731
        estimator.train(batches)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


UPDATES = {
    "minimizes by example": by_example,
    "scaled": scaled,
    "around own": lambda loss, w, step: (Around(Own()).minimize(loss, step), loss),
    "unused": unused,
    "twice": twice,
    "in a scope": in_a_scope,
    "computed": computed,
}


@pytest.mark.parametrize("kind", UPDATES)
def test_variables_and_their_values_are_the_librarys(tmp_path, kind):
    trainings = 2 if kind == "in a scope" else 1
    plain = trained(tf_estimator.Estimator.__base__, 1, tmp_path / "library", UPDATES[kind], trainings=trainings)
    for towers in (1, 3) if kind in ("around own", "twice") else (3,):
        ours = trained(tf_estimator.Estimator, towers, tmp_path / str(towers), UPDATES[kind], trainings=trainings)
        assert plain.keys() == ours.keys()
        for name, value in plain.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-9, err_msg=f"{name}, {towers} towers")


def count_updates(folder, update, towers, steps=8, hooks=()):
    """Returns how often updates of 1 were done in so many steps; update(optimizer, gradients, step) -> train_op."""

    def fn(features, labels, mode):
        w, step = v1.get_variable("w", [], tf.float64, v1.zeros_initializer()), v1.train.get_global_step()
        sgd, loss = v1.train.GradientDescentOptimizer(1.0), w * tf.reduce_mean(labels * 0 + 1)
        train_op = update(lambda: sgd.apply_gradients(sgd.compute_gradients(loss, [w])), step)
        with tf.control_dependencies([train_op]):
            return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=step.assign_add(1), training_hooks=hooks)

    estimator = tf_estimator.Estimator(fn, str(folder), tf_estimator.RunConfig(num_gpus=towers))
    estimator.train(lambda: input_fn(epochs=None), steps=steps)
    return -estimator.get_variable_value("w")


@pytest.mark.parametrize(
    ("update", "right"),
    [
        (lambda make, step: tf.cond(tf.equal(step % 4, 0), make, tf.no_op), 2),
        (lambda make, step: (make(), tf.no_op())[1], 0),
    ],
)
def test_an_update_is_done_as_often_as_the_program_says(tmp_path, update, right):
    assert count_updates(tmp_path / "1", update, 1) == right
    if right:  # a branch has a graph of its own in each tower
        with pytest.raises(errors.GraphError, match="^GradientDescentOptimizer.apply_gradients is inside of a branch"):
            count_updates(tmp_path / "2", update, 2)
    else:
        assert count_updates(tmp_path / "2", update, 2) == right


def test_an_update_that_a_hook_runs(tmp_path):
    hook = Runs()

    def update(make, step):
        op = make()
        hook.op = hook.op or op  # the first tower's, and all towers'
        return tf.no_op()

    assert count_updates(tmp_path, update, 2, hooks=[hook]) == 8


def test_towers_that_update_otherwise_are_named(tmp_path):
    made = []

    def update(make, step):
        made.append(step)
        return make() if len(made) < 3 else step.assign_add(2)

    with pytest.raises(errors.GraphError, match=r"tower_0 is at the gradients \(no. 1\) of w, .* tower_2 at the end"):
        count_updates(tmp_path, update, 3)


def test_what_a_model_fn_assigns_is_assigned_once(tmp_path):
    def fn(features, labels, mode):
        ops = []
        for use_resource in (False, True):
            made = dict(initializer=v1.ones_initializer(), trainable=False, use_resource=use_resource)
            counts = v1.get_variable(f"counts{use_resource}", [3], **made)
            with tf.control_dependencies([v1.assign_add(counts, [0.0, 0.0, 1.0])]):
                ops += [v1.scatter_add(counts, [0], [1.0])]
            with tf.control_dependencies(ops), tf.control_dependencies([v1.scatter_nd_add(counts, [[1]], [1.0])]):
                ops += [
                    counts.scatter_mul(tf.IndexedSlices([2.0], [1]))
                    if use_resource
                    else v1.scatter_mul(counts, [1], [2.0])
                ]
        w = v1.get_variable("w", [], tf.float64, v1.zeros_initializer())
        with tf.control_dependencies(ops):
            sgd = v1.train.GradientDescentOptimizer(1.0)
            train_op = sgd.minimize(w * tf.reduce_mean(labels), v1.train.get_global_step())
        return tf_estimator.EstimatorSpec(mode, loss=w.read_value(), train_op=train_op)

    for towers in (1, 3):
        estimator = tf_estimator.Estimator(fn, str(tmp_path / str(towers)), tf_estimator.RunConfig(num_gpus=towers))
        estimator.train(lambda: input_fn(epochs=None), steps=2)
        for kind in (False, True):
            np.testing.assert_array_equal(estimator.get_variable_value(f"counts{kind}"), [3, 10, 3])
