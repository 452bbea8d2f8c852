"""Initial values that come from the training examples are made of the first of them, and only where they are used."""

import dataclasses

import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

import tower_train
from tower_train import Config, initializers
from tower_train.config import EvaluateOptions, ExportOptions
from tower_train.inference import saved_model
from tower_train.workload import DataRequest

v1 = tf.compat.v1
COUNT = 20


def centred(calls):
    """The toy workload on features whose mean over the first 20 examples is taken off; `calls` gets (features, labels)
    each time that mean is computed."""

    def inference_for(examples):
        def mean(features, labels):
            calls.append((features, labels))
            return features.mean(axis=0)

        initial = initializers.FromExamples(examples, COUNT, mean)

        def inference(features, training):
            center = v1.get_variable("center", [4], features.dtype, initial)
            return toy_workload.network(features - center, training)

        return inference

    return dataclasses.replace(toy_workload.WORKLOAD, name="centred", inference=None, inference_for=inference_for)


@pytest.mark.parametrize(
    "options",
    [dict(num_gpus=2, variable_update="mirrored", check_mirrors_every_steps=1), dict(num_gpus=1, dtype="bfloat16")],
    ids=str,
)
def test_it_is_what_numpy_makes_of_the_first_training_examples(options):
    """Computed once, whatever the towers, copies and threads; the moving average begins with it."""
    examples, (features, labels) = toy_workload.load(DataRequest("train")), element_workloads.arrays("train")
    options = options | dict(batch_size=8, learning_rate=0.1, ema=0.9)
    _, variables = trainings.train(centred(calls := []), examples, 0, **options)
    [(found_features, found_labels)] = calls
    np.testing.assert_array_equal(found_features, features[:COUNT])
    np.testing.assert_array_equal(found_labels, labels[:COUNT])
    for name in ("center", "center/ExponentialMovingAverage"):
        np.testing.assert_array_equal(variables[name], features[:COUNT].mean(axis=0))


def test_one_thread_is_enough():
    """In a process of its own, since the first session of a process makes the threads of all."""
    program = """
import test_initializers, toy_workload, trainings
from tower_train.workload import DataRequest
examples = toy_workload.load(DataRequest("train"))
print(*trainings.train(test_initializers.centred([]), examples, 1, num_gpus=1))
"""
    found = jobs.command("-c", program, TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
    assert found.returncode == 0 and "center" in found.stdout, found.stderr


def test_what_a_checkpoint_lacks_begins_with_it_and_nothing_is_computed_to_resume_evaluate_or_export(tmp_path):
    """The rest is restored, and the SavedModel holds no Python function."""
    workload = centred(calls := [])
    options = jobs.SMALL | dict(train_dir=str(tmp_path / "run"), override=True, learning_rate=1e-30)
    tower_train.train(dataclasses.replace(toy_workload.WORKLOAD, name="centred"), Config(max_steps=5, **options))
    before = jobs.variables(tmp_path / "run")
    for steps in (6, 7):
        tower_train.train(workload, Config(max_steps=steps, eval_at_end=steps == 7, **options))
    after, (features, _) = jobs.variables(tmp_path / "run"), element_workloads.arrays("train")
    np.testing.assert_array_equal(after["center"], features[:COUNT].mean(axis=0))
    np.testing.assert_array_equal(after["hidden/weights"], before["hidden/weights"])
    [found] = tower_train.evaluate_run(EvaluateOptions(train_dir=options["train_dir"]), workload)
    assert found.step == 7
    saved_model.export_run(ExportOptions(train_dir=options["train_dir"], export_dir=str(tmp_path / "model")), workload)
    assert len(calls) == 1
    assert b"PyFunc" not in (tmp_path / "model" / "saved_model.pb").read_bytes()
