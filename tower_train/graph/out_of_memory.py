"""One line about a step that needs more memory, or more of what NCCL needs, than there is."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors, host

_OF_ONE_MEMORY = {"Identity", "IdentityN", "StopGradient", "Reshape", "Squeeze", "ExpandDims"}
_OF_SHAPES = {"Shape", "ShapeN", "Size", "ZerosLike", "OnesLike"}  # need no values
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


def check_tensors(train_op: tf.Operation, batch_size: int, accumulate_steps: int, is_compiled: bool) -> None:
    """Refuses a step whose tensors need more memory than the host has, since TensorFlow may crash silently.

    Counts what the first tower's gradients need of its forward pass, as all of that is there at once (unless XLA
    compiles it), and each tensor by itself. A step may need more.

    Raises:
      RunError: the memory does not suffice.
    """
    memory, kept, most = host.memory_limit(), {}, (0, None)
    for op in _needed_by(train_op):
        # one tower, since the others may begin when its tensors are gone
        if op.name.startswith("tower_0/") and "gpu" not in op.device.lower():
            is_gradient = "/gradients/" in op.name and op.type not in _OF_SHAPES
            for each in map(_source, op.inputs if is_gradient and not is_compiled else ()):
                if each.op.name.startswith("tower_0/") and "/gradients/" not in each.op.name:
                    kept[each.ref()] = _num_bytes(each)
            most = max([most, *((_num_bytes(each), each) for each in op.outputs)], key=lambda pair: pair[0])
    if max(most[0], sum(kept.values())) > memory:
        largest = f"a {most[1].dtype.name} tensor {most[1].shape.as_list()}"
        together = f"{largest} and others, together {sum(kept.values()) / 2**30:.1f} GiB, have"
        raise errors.RunError(
            f"Out of memory: {f'{largest} has' if most[0] > memory else together} no place on the host, where this "
            f"process may have {memory / 2**30:.1f} GiB. {_memory_advice(batch_size, accumulate_steps)}"
        )


def _needed_by(op: tf.Operation) -> set[tf.Operation]:
    needed, rest = set(), [op]
    while rest:
        if (op := rest.pop()) not in needed:
            needed.add(op)
            rest += [*(each.op for each in op.inputs), *op.control_inputs]
    return needed


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory a tensor shares."""
    while tensor.op.type in _OF_ONE_MEMORY:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _num_bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


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
