"""Fixtures of this room's tests."""

import keras
import keras_twins
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def same_data():
    """Random data that do not depend on the tests before, so that what fails on them fails again."""
    keras_twins.rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
