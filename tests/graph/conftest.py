"""Training on logical CPU devices, for the tests of this room."""

import contextlib

import pytest
import tensorflow as tf

from tower_train.config import Config
from tower_train.graph import devices, training

v1 = tf.compat.v1


@contextlib.contextmanager
def _open_training(workload, examples, **options):
    config = Config(device="cpu", **options)
    placed = devices.place(config)
    built = training.training_graph(workload, examples, config, placed)
    with built.graph.as_default(), v1.Session(config=placed.session_config) as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        session.run(built.stream_initializer)
        yield built, session


@pytest.fixture(scope="session")
def open_training():
    """(workload, examples, **options of Config) -> context manager of (TrainingGraph, Session), before the first step.

    Fetching `report` does a step.
    """
    return _open_training
