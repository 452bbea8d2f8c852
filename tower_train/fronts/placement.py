"""Devices for towers in a process that uses its GPUs outside the towers too."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.config import DeviceOptions
from tower_train.graph import devices


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
    ids = _asked(gpus, argument, len(here))
    missing = [i for i in ids if i >= len(here)] if here or _is_list(gpus) else []
    if missing:
        there = ", ".join(map(str, range(len(here)))) or "none"
        raise errors.ConfigError(
            f"{argument}={gpus}: this program sees {len(here)} GPUs ({there}). Ask for those (CUDA_VISIBLE_DEVICES "
            "hides the others); on a machine without GPUs a count makes towers on the CPU."
        )
    if here:
        placed = devices.place(DeviceOptions(gpus=tuple(ids)), here)
        devices.use_gpus_alike(placed.session_config)
        return dataclasses.replace(placed, towers=tuple(f"/gpu:{i}" for i in ids))
    if (count := len(ids)) > 1:
        console.notice(f"There is no GPU: {count} towers on the CPU.")
    placed = devices.place(DeviceOptions(num_gpus=count, device="cpu"))
    if in_session:
        return placed
    cpus = len(tf.config.list_logical_devices("CPU"))
    return dataclasses.replace(placed, towers=tuple(f"/cpu:{i % cpus}" for i in range(count)))


def _is_list(gpus) -> bool:
    return isinstance(gpus, (Sequence, np.ndarray)) and not isinstance(gpus, str)


def _asked(gpus, argument: str, gpus_here: int) -> list[int]:
    """Returns the ids of the GPUs asked for, one for each tower."""
    if gpus is None:
        gpus = max(gpus_here, 1)
    ids = list(gpus) if _is_list(gpus) else range(gpus) if _is_count(gpus) else []
    if not ids or not all(_is_count(i) for i in ids):
        raise errors.ConfigError(
            f"{argument}={gpus!r}: it must be a count of at least 1, a list of GPU ids such as [0, 2], or None for all."
        )
    ids = [int(i) for i in ids]
    if len(set(ids)) != len(ids):
        raise errors.ConfigError(f"{argument}={gpus} names a GPU twice. Name each GPU once.")
    return ids


def _is_count(value) -> bool:
    """Returns whether a value is a whole number, Python's or numpy's, from 0 on."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0
