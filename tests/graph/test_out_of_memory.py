"""Too little memory, and NCCL's failures, are one line that says what to try."""

import pytest
import tensorflow as tf

from tower_train import errors
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


def test_nccls_failures_tell_what_to_try():
    text = fail(tf.errors.InternalError(None, None, NCCL.format("unhandled system error")), 8, 1)
    assert text.startswith("NCCL cannot average between these GPUs (NCCL: unhandled system error")
    assert "docker run --shm-size=1g" in text and text.endswith("--all_reduce=collective.")
