"""--deterministic and --tensor_float_32: what TensorFlow is told, and that it trains, evaluates and exports so. Too
little memory, and NCCL's failures, are one line that says what to try."""

import jobs
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

from tower_train import errors
from tower_train.config import EvaluateOptions
from tower_train.graph import step_failures
from tower_train.inference import saved_run

v1 = tf.compat.v1


def test_products_are_rounded_as_the_run_says_or_else_as_the_program_and_so_where_it_is_evaluated(tmp_path):
    setting = tf.config.experimental
    try:
        for option, program, expected in ((True, False, True), (None, False, False)):
            setting.enable_tensor_float_32_execution(program)
            folder = tmp_path / str(option)
            jobs.train_toy(folder, max_steps=1, **({} if option is None else {"tensor_float_32": option}))
            assert setting.tensor_float_32_execution_enabled() == expected
            assert jobs.read_json(folder, "run.json")["config"]["tensor_float_32"] is option
            for before in (False, True):
                setting.enable_tensor_float_32_execution(before)
                saved_run.read(EvaluateOptions(train_dir=str(folder)))
                assert setting.tensor_float_32_execution_enabled() == (before if option is None else option)
    finally:
        setting.enable_tensor_float_32_execution(True)


def test_a_deterministic_run_repeats_and_is_evaluated(tmp_path, capsys):
    """TensorFlow then refuses random numbers without a seed, until the process ends."""
    try:
        for name in ("one", "two"):
            jobs.train_toy(tmp_path / name, max_steps=2, eval_at_end=name == "one", deterministic=True)
        assert "precision @ 1 = " in capsys.readouterr().out
    finally:
        config.disable_op_determinism()
    assert jobs.read_json(tmp_path / "one", "run.json")["config"]["deterministic"] is True
    jobs.assert_identical(*(jobs.variables(tmp_path / name, 2) for name in ("one", "two")))


@pytest.mark.parametrize(
    ("name", "raised", "error", "message"),
    [
        (
            "tower_0/counts",
            NotImplementedError("Determinism is not yet supported in GPU implementation of Bincount."),
            errors.GraphError,
            r"^--deterministic: tower_0/counts \(PyFunc\) has no kernel .* \(.*Bincount\)\. Leave the",
        ),
        ("tower_0/counts", NotImplementedError("No such thing."), tf.errors.UnimplementedError, "No such thing"),
        ("update/counts", ValueError("No such row."), tf.errors.InvalidArgumentError, "No such row"),
    ],
    ids=["a kernel", "something else", "not in a tower"],
)
def test_an_operation_without_such_a_kernel_is_named(name, raised, error, message):
    def fail():
        raise raised

    with tf.Graph().as_default(), v1.Session() as session:
        counts = v1.py_func(fail, [], tf.float32, name=name)
        with pytest.raises(error, match=message), step_failures.explained(None, "workload"):
            session.run(counts)


ALLOCATION = (
    "OOM when allocating tensor with shape[128,64,24,24] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"
    "\n\t [[{{node tower_1/conv1/Conv2D}}]]\nHint: If you want to see a list of ..."
)
NCCL = "NCCL: {}. Set NCCL_DEBUG=WARN for detail.\n\t [[{{{{node all_reduce/CollectiveReduceV2}}}}]]"


def fail(error, *args):
    with pytest.raises(errors.RunError) as raised, step_failures.explained(None, "workload", False, *args):
        raise error
    assert "\n" not in str(raised.value) and raised.value.exit_status == 2
    return str(raised.value)


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        ((128, 1), "A tower has 128 examples at a time: try --batch_size=64; with --accumulate_steps=2 a step has as"),
        ((64, 3), "A tower has 64 examples at a time: try --batch_size=32; with --accumulate_steps=6 a step has as"),
        ((1, 1), "Free memory, or train a smaller network."),
        ((64,), "A tower has 64 examples at a time: try --batch_size=32."),
    ],
)
def test_too_little_memory_tells_the_batch_to_try(args, advice):
    text = fail(tf.errors.ResourceExhaustedError(None, None, ALLOCATION), *args)
    assert advice in text and text.startswith("Out of memory: a float tensor [128,64,24,24] has no place on GPU:1. ")


def test_nccls_failures_tell_what_to_try():
    text = fail(tf.errors.InternalError(None, None, NCCL.format("unhandled system error")), 8, 1)
    assert text.startswith("NCCL cannot average between these GPUs (NCCL: unhandled system error")
    assert "docker run --shm-size=1g" in text and text.endswith("--all_reduce=collective.")
