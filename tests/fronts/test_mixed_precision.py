"""Keras models in mixed precision are trained in towers as Keras trains them, with the same steps skipped.

A batch is made of two halves that are the same, so that the sums over a half and over the whole are rounded alike.
"""

import keras
import numpy as np
import pytest
from keras_twins import CROSS_ENTROPY, assert_same, data, fit_both, small_network

layers, rng = keras.layers, np.random.default_rng(0)
X, Y = (
    np.repeat(part.reshape(6, 1, 4, -1), 2, axis=1).reshape(48, -1).astype(np.float32)
    for part in (rng.normal(size=[24, 3]), rng.uniform(5, 6, [24, 2]))
)
FIRST, STEPS = 2.0**24, 12  # of which the first overflow


@pytest.fixture
def policy():
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


def dense():
    """Has gradients of one sign, which grow with the examples."""
    return keras.Sequential([keras.Input([3]), layers.Dense(2, name="dense")], name="net")


def scaling(optimizer, first=FIRST):
    return keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=first, dynamic_growth_steps=3)


def scale_of(optimizer):
    """The scale, the finite steps since it changed, and the updates."""
    return [float(v) for v in (optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations)]


@pytest.mark.parametrize(("name", "atol"), [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)])
def test_a_convolution_is_trained_by_a_plain_optimizer(policy, name, atol):
    policy(name)
    x, y = data(8, 6, 6, 2)
    trained = fit_both(small_network, 2, {"optimizer": "sgd", "loss": CROSS_ENTROPY}, x, y, batch_size=4, epochs=2)
    assert_same(trained, atol)
    for model, _ in trained:
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (name == "mixed_float16")
        assert {weight.dtype for weight in model.weights} == {"float32"}


def test_steps_are_skipped_where_the_whole_batchs_gradients_overflow(policy):
    """One example has all of the gradient, which towers must not multiply by their number."""
    policy("mixed_float16")
    x, y = np.zeros([6, 3], np.float32), np.zeros([6, 2], np.float32)
    x[0], y[0] = 1, 8
    for power, updates in ((15, 1), (16, 0)):  # the last one is skipped
        still = lambda power=power: dict(loss="mse", optimizer=scaling(keras.optimizers.SGD(0.0), 2.0**power))  # noqa: E731
        (one, _), (template, _) = fit_both(dense, 3, still, x, y, batch_size=6)
        assert scale_of(template.optimizer) == scale_of(one.optimizer) and scale_of(one.optimizer)[2] == updates


def test_the_same_steps_are_skipped_to_the_bit_and_the_scale_is_saved(policy, tmp_path):
    policy("mixed_float16")
    fits = fit_both(dense, 2, lambda: dict(optimizer=scaling(keras.optimizers.Adam(0.01)), loss="mse"), X, Y, 8, 2)
    (one, _), (template, _) = fits
    assert_same(fits, 0)
    assert scale_of(template.optimizer) == scale_of(one.optimizer)
    scale, _, updates = scale_of(one.optimizer)
    assert updates < STEPS - 3 and scale < FIRST
    template.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert scale_of(loaded.optimizer) == scale_of(one.optimizer)
