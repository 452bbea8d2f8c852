"""One line about a step that needs more memory, or more of what NCCL needs, than there is."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors, host

_NCCL_ADVICE = {  # {part of its message: what to try}
    "invalid usage|Duplicate GPU": "Let each worker have GPUs of its own (--gpus).",
    "unhandled cuda error|peer": "If the GPUs have no access to each other, set NCCL_P2P_DISABLE=1.",
    "": "In a container /dev/shm may be too small (docker run --shm-size=1g), or libnccl is missing or of another "
    "CUDA: NCCL_DEBUG=WARN says more.",
}


@contextlib.contextmanager
def explained(batch_size: int, accumulate_steps: int | None = None) -> Iterator[None]:
    """Converts the failure of an allocation, or of NCCL between devices, into one line.

    Args:
      batch_size: examples that a tower has at a time, to tell what to try.
      accumulate_steps: batches of a tower and step in training.

    Raises:
      RunError: there was too little memory; or NCCL failed.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        advice = _memory_advice(batch_size, accumulate_steps)
        raise errors.RunError(f"Out of memory: {_allocation(error.message)}. {advice}") from error
    except tf.errors.OpError as error:
        if "NCCL" not in error.message or isinstance(error, tf.errors.InvalidArgumentError):
            raise
        what = next(text for part, text in _NCCL_ADVICE.items() if re.search(part, error.message, re.IGNORECASE))
        raise errors.RunError(
            f"NCCL cannot average between these GPUs ({errors.reason(error)}). {what} Or train with "
            "--all_reduce=collective, or --variable_update=cpu."
        ) from error


def check_tensors(graph: tf.Graph, batch_size: int, accumulate_steps: int) -> None:
    """Refuses a step with a tensor that is larger than the host's memory: TensorFlow's convolutions crash on one.

    Raises:
      RunError: there is one in the first tower.
    """
    memory = host.total_memory()
    for op in graph.get_operations():
        if op.name.startswith("tower_0/") and "gpu" not in op.device.lower():
            for each in op.outputs:
                if (each.shape.num_elements() or 0) * each.dtype.size > memory:
                    raise errors.RunError(
                        f"Out of memory: a {each.dtype.name} tensor {each.shape.as_list()} has no place on the host, "
                        f"which has {memory / 2**30:.1f} GiB. {_memory_advice(batch_size, accumulate_steps)}"
                    )


def _memory_advice(batch_size: int, accumulate_steps: int | None) -> str:
    if batch_size == 1:
        return "Free memory, or train a smaller network."
    text = f"A tower has {batch_size} examples at a time: try --batch_size={batch_size // 2}"
    if accumulate_steps:
        text += f"; with --accumulate_steps={2 * accumulate_steps} a step has as many as before"
    return text + "."


def _allocation(message: str) -> str:
    found = re.search(r"shape\s*(\[[\d,]*\]) and type (\w+) on \S*device:(\w+:\d+)", message)
    return f"a {found[2]} tensor {found[1]} has no place on {found[3]}" if found else message.splitlines()[0][:200]
