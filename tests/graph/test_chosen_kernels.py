"""--deterministic and --tensor_float_32: what TensorFlow is told, and that it trains, evaluates and exports with it."""

import jobs
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from tower_train import errors
from tower_train.config import EvaluateOptions
from tower_train.graph import step_failures
from tower_train.inference import saved_run

v1 = tf.compat.v1


@pytest.fixture
def is_tensor_float_32():
    yield tf.config.experimental.tensor_float_32_execution_enabled
    tf.config.experimental.enable_tensor_float_32_execution(True)


def test_products_are_rounded_as_the_run_says_also_where_it_is_evaluated(is_tensor_float_32, tmp_path):
    jobs.train_toy(tmp_path, max_steps=1, tensor_float_32=False)
    assert not is_tensor_float_32()
    jobs.train_toy(tmp_path / "another", max_steps=1, tensor_float_32=True)
    assert is_tensor_float_32()
    saved_run.read(EvaluateOptions(train_dir=str(tmp_path)))
    assert not is_tensor_float_32()


@pytest.mark.parametrize("setting", [False, True])
def test_a_run_that_says_nothing_leaves_what_the_program_has_set(setting, is_tensor_float_32, tmp_path):
    tf.config.experimental.enable_tensor_float_32_execution(setting)
    jobs.train_toy(tmp_path, max_steps=1)
    assert is_tensor_float_32() == setting
    assert jobs.read_json(tmp_path, "run.json")["config"]["tensor_float_32"] is None
    saved_run.read(EvaluateOptions(train_dir=str(tmp_path)))
    assert is_tensor_float_32() == setting


def test_a_deterministic_run_repeats_and_is_evaluated(tmp_path, capsys):
    """TensorFlow then refuses random numbers without a seed, until the process ends."""
    try:
        for name in ("one", "two"):
            jobs.train_toy(tmp_path / name, max_steps=4, eval_at_end=True, deterministic=True)
            assert "precision @ 1 = " in capsys.readouterr().out
    finally:
        config.disable_op_determinism()
    assert jobs.read_json(tmp_path / "one", "run.json")["config"]["deterministic"] is True
    jobs.assert_identical(*(jobs.variables(tmp_path / name, 4) for name in ("one", "two")))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("Determinism is not yet supported in GPU implementation of Bincount.", errors.GraphError, "^--deterministic: "
         r"tower_0/counts \(PyFunc\) has no kernel on its device .* \(.* Bincount\)\. Leave the"),
        ("No such thing.", tf.errors.UnimplementedError, "No such thing"),
    ],
    ids=["a kernel", "something else"],
)  # fmt: skip
def test_an_operation_without_such_a_kernel_is_named(text, error, message):
    def fail():
        raise NotImplementedError(text)

    with tf.Graph().as_default(), v1.Session() as session:
        counts = v1.py_func(fail, [], tf.float32, name="tower_0/counts")
        with pytest.raises(error, match=message), step_failures.named("mine", "workload"):
            session.run(counts)
