"""Devices for towers, and for the weights of Keras models, in a process that uses its GPUs outside the towers too."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.config import DeviceOptions
from tower_train.fronts import compat
from tower_train.graph import devices

v1 = tf.compat.v1


def place(gpus: int | Sequence[int] | None, argument: str, in_session: bool = False) -> devices.Devices:
    """Chooses the devices of towers, as this process numbers its devices.

    The program may use its other GPUs too, so none is hidden from it, and a GPU is any logical one that it made.
    Without GPUs the towers share the CPU: tower i lives on logical CPU device i if the program made that many, else
    they take turns; one line on standard error says so.

    Args:
      gpus: number of towers, or the ids of the GPUs that carry them, or None: one on each GPU.
      argument: the user's name for gpus, for messages.
      in_session: whether the towers run in a session of their own.

    Raises:
      ConfigError: no tower, a GPU named twice, or a missing GPU; the message lists the GPUs.
    """
    devices.let_memory_grow(tf.config.get_visible_devices("GPU"))
    here = [device.name for device in tf.config.list_logical_devices("GPU")]
    is_list = np.ndim(gpus) == 1  # whatever it is of
    try:
        ids = tuple(operator.index(i) for i in (gpus if is_list else range(len(here) or 1 if gpus is None else gpus)))
    except TypeError:
        ids = ()
    if not ids or min(ids) < 0 or len(set(ids)) != len(ids):
        raise errors.ConfigError(
            f"{argument}={gpus!r}: it must be a count of at least 1, a list of different GPU ids such as [0, 2], or "
            "None for all."
        )
    if (here or is_list) and max(ids) >= len(here):
        there = ", ".join(map(str, range(len(here)))) or "none"
        raise errors.ConfigError(
            f"{argument}={gpus}: this program sees {len(here)} GPUs ({there}). Ask for those (CUDA_VISIBLE_DEVICES "
            "hides the others); on a machine without GPUs a count makes towers on the CPU."
        )
    if here:
        placed = devices.place(DeviceOptions(gpus=ids), here)
        devices.use_gpus_alike(placed.session_config)
        return dataclasses.replace(placed, towers=tuple(f"/gpu:{i}" for i in ids))
    if len(ids) > 1:
        console.notice(f"There is no GPU: {len(ids)} towers on the CPU.")
    placed = devices.place(DeviceOptions(num_gpus=len(ids), device="cpu"))
    if in_session:
        return placed
    cpus = len(tf.config.list_logical_devices("CPU"))
    return dataclasses.replace(placed, towers=tuple(f"/cpu:{i % cpus}" for i in ids))


_CHOICES = {
    "batch_norm": ("global", "tower"),
    "check_towers": ("auto", "never"),
    "jit_compile": ("auto", "always", "never"),
}


def check_choices(who: str, **arguments: str) -> None:
    """Raises ConfigError for another value than the known ones of these arguments."""
    for name, value in arguments.items():
        if value not in _CHOICES[name]:
            raise errors.ConfigError(f"{who}({name}={value!r}): it must be {' or '.join(map(repr, _CHOICES[name]))}.")


class Balance:
    """Spreads variables over the GPUs of towers by size: a GPU sends its variables to all, and gets their gradients, in
    all as much as in an all-reduce. A lone GPU has all of them; nothing crosses."""

    def __init__(self, towers: Sequence[str]):
        gpus = [tf.DeviceSpec.from_string(tower).device_index for tower in towers if "gpu" in tower]
        self.bytes_on = dict.fromkeys(gpus, 0)

    def next(self) -> str:
        """Returns the device of the next variable: the GPU with the fewest bytes; the host if there is no GPU."""
        return f"/gpu:{min(self.bytes_on, key=self.bytes_on.get)}" if self.bytes_on else devices.HOST

    def add(self, variable) -> None:
        """Counts a variable, if it is on a tower's GPU: a program may place it on another."""
        index = tf.DeviceSpec.from_string(device).device_index if (device := of(variable)) != devices.HOST else None
        if index in self.bytes_on:
            self.bytes_on[index] += num_bytes(variable)

    def tell_cost(self, model, name: str, on_host: Iterable) -> None:
        """Says, once for a model, what it costs that variables are on the host."""
        megabytes = sum(map(num_bytes, on_host)) // 10**6
        if self.bytes_on and megabytes:
            console.notice_once(
                model,
                f"{name} has {megabytes} MB of variables on the host: in each step they go to each GPU, and as much "
                "comes back. Without tf.device('/cpu:0') around them they are on the GPUs.",
            )


def weights(model: keras.Model) -> list[keras.Variable]:
    """Returns a model's variables of floating-point numbers; others have their place on the host anyway."""
    return [each for each in model.weights if tf.as_dtype(each.dtype).is_floating]


def num_bytes(variable) -> int:
    """Returns the size of a variable of Keras or TensorFlow; 0 without a known shape."""
    return (tf.TensorShape(variable.shape).num_elements() or 0) * tf.as_dtype(variable.dtype).size


def spread(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer], towers: Sequence[str], built: set[int]
) -> None:
    """Spreads a model's weights over the GPUs of its towers, each with what optimizers keep of it. Weights that were
    built on the host, by id, stay there."""
    balance = Balance(towers)
    if not balance.bytes_on:
        return
    on_host = {id(each): each for each in weights(model) if id(each) in built and of(each) == devices.HOST}
    balance.tell_cost(model.optimizer or model, model.name, on_host.values())
    slots = [slot for each in optimizers for slot in each.variables]
    others = (each for each in weights(model) if id(each) not in on_host)
    for weight in sorted(others, key=num_bytes, reverse=True):
        gpu, slot_prefix = balance.next(), f"{weight.path.replace('/', '_')}_"  # how Keras names slots
        for variable in (weight, *(slot for slot in slots if slot.name.startswith(slot_prefix))):
            compat.move(variable, gpu)
        balance.add(weight)
    for name in ("train_function", "test_function", "predict_function"):  # they read the storage of before
        setattr(model, name, None)


def beside_inputs():
    """Places operations of this block on the first GPU that has one of their inputs, others on the host."""

    def place(op: tf.Operation) -> str:
        if op.device:
            return op.device
        if any(output.dtype.is_integer for output in op.outputs):  # kernels of GPUs have most of them on the host
            return devices.HOST
        return next((name for name in map(_device, op.inputs) if "GPU" in name.upper()), devices.HOST)

    return v1.device(place)


def of(variable) -> str:
    """Returns the device of a variable of Keras or TensorFlow, the host's name unless it is a GPU."""
    device = compat.storage(variable).device if isinstance(variable, keras.Variable) else variable.device
    return device if "GPU" in device.upper() else devices.HOST


def _device(tensor: tf.Tensor) -> str:
    """Returns the device of a tensor in a graph, also one that only TensorFlow's placer gives it: of a variable that is
    read, or what a function captures."""
    if hasattr(tensor, "numpy") or tensor.device:
        return tensor.device
    if tensor.op.type == "Placeholder":
        outer = [outside for outside, inside in getattr(tensor.graph, "captures", ()) if inside is tensor]
    else:
        outer = tensor.op.inputs if tensor.op.type in ("ReadVariableOp", "Identity") else ()
    return next(map(_device, outer), "")
