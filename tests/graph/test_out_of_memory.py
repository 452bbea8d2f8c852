"""Too little memory, and NCCL's failures, are one line that says what to try."""

import dataclasses

import jobs
import pytest
import tensorflow as tf
import toy_workload

from tower_train import errors, host
from tower_train.graph import step_failures

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


def test_a_tensor_larger_than_the_hosts_memory_is_refused_before_the_first_step(tmp_path, monkeypatch):
    hidden = 8 * 128 * 4  # bytes of 8 units, in float32
    for memory, words in (
        (hidden - 1, "has no place on the host"),
        (hidden, "and others, together .* no place on"),
    ):
        monkeypatch.setattr(host, "memory_limit", lambda memory=memory: memory)
        with pytest.raises(errors.RunError, match=rf"a float32 tensor \[128, 8\] {words}.*--batch_size=64"):
            jobs.train_toy(tmp_path, batch_size=128, max_steps=1)
    jobs.train_toy(tmp_path, batch_size=32, max_steps=1)


def test_tensors_of_unknown_sizes_are_let_through(tmp_path):
    def network(features, training):
        return tf.compat.v1.placeholder_with_default(toy_workload.network(features, training), [None, None])

    workload = dataclasses.replace(toy_workload.WORKLOAD, inference=network)
    assert jobs.train_toy(tmp_path, workload=workload, max_steps=1).step == 1


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("unhandled system error", "docker run --shm-size=1g"),
        ("unhandled cuda error", "NCCL_P2P_DISABLE=1"),
        ("invalid usage", "GPUs of its own"),
    ],
)
def test_nccls_failures_tell_what_to_try(reason, advice):
    text = fail(tf.errors.InternalError(None, None, NCCL.format(reason)), 8, 1)
    assert text.startswith(f"NCCL cannot average between these GPUs (NCCL: {reason}")
    assert advice in text and text.endswith("--all_reduce=collective, or --variable_update=cpu.")
