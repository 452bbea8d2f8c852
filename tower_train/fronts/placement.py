"""Devices for towers in a process that uses its GPUs outside the towers too."""

import dataclasses
import operator
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


def check_choices(who: str, batch_norm: str, check_towers: str) -> None:
    """Raises ConfigError for another value than the known ones of these arguments."""
    for name, value, *known in (
        ("batch_norm", batch_norm, "global", "tower"),
        ("check_towers", check_towers, "auto", "never"),
    ):
        if value not in known:
            raise errors.ConfigError(f"{who}({name}={value!r}): it must be {known[0]!r} or {known[1]!r}.")
