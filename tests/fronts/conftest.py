"""Fixtures of the front ends' tests."""

import keras
import keras_twins
import numpy as np
import pytest

from tower_train.fronts.keras_towers import proof as keras_proof
from tower_train.fronts.tf_estimator import proof as estimator_proof


@pytest.fixture(autouse=True)
def same_data():
    """Random data that do not depend on the tests before, so that what fails on them fails again."""
    keras_twins.rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch, request):
    """Trainings that compare nothing first, which would take most of the time, but in tests that ask for `compared`."""
    if "compared" not in request.fixturenames:
        monkeypatch.setattr(keras_proof, "first_step", lambda parallel, train: train)
        monkeypatch.setattr(estimator_proof, "compare_first", lambda estimator, input_fn: None)


@pytest.fixture
def compared():
    """Trainings that compare towers with one device first, as they do in programs."""


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
