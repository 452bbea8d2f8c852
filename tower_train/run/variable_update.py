"""--variable_update=auto: towers on GPUs have their variables there, towers on the CPU on the host."""

import dataclasses

from tower_train.config import Config
from tower_train.graph.devices import Devices


def resolve(config: Config, began_with: str | None, placed: Devices) -> tuple[Config, list[str]]:
    """Replaces auto by a place of the variables, and None by an all-reduce.

    Args:
      config: all options.
      began_with: the place in the last start, which the run keeps; None for a new run.
      placed: the devices of the towers.

    Returns:
      The config, and a line for each choice made for GPUs.
    """
    lines = []
    if config.variable_update == "auto":
        update, reason = _choose(config, began_with, placed)
        config = dataclasses.replace(config, variable_update=update)
        lines.append(f"variable_update: {update}, {reason}")
    if config.variable_update == "mirrored" and config.all_reduce is None and len(placed.gpus) > 1:
        obstacle = _nccl_obstacle(config, placed)
        config = dataclasses.replace(config, all_reduce="collective" if obstacle else "nccl")
        lines.append(f"all_reduce: {config.all_reduce}, {obstacle or f'between {len(placed.gpus)} GPUs'}")
    return config, lines if placed.gpus else []


def _choose(config: Config, began_with: str | None, placed: Devices) -> tuple[str, str]:
    """Returns (place, reason)."""
    if config.all_reduce is not None:
        return "mirrored", "for --all_reduce"
    if len(placed.towers) > 1 and placed.num_workers == 1:  # else there are copies in both modes
        if config.check_mirrors_every_steps:
            return "mirrored", "for --check_mirrors_every_steps"
        if config.all_reduce_dtype != "same":
            return "mirrored", "for --all_reduce_dtype"
    if began_with in ("cpu", "mirrored"):
        return began_with, "as the run began"
    # A lone GPU too: with its variables on the host, copies take half of ResNet-50's step (tower_train.plan).
    return ("mirrored", "on the GPUs") if placed.gpus else ("cpu", "for towers on the CPU")


def _nccl_obstacle(config: Config, placed: Devices) -> str | None:
    """Returns why NCCL cannot average between these GPUs; None if it can."""
    unknown = [gpu.name for gpu in placed.gpus if gpu.capability is None]
    if unknown:
        return f"since NCCL is for NVIDIA's GPUs, which {unknown[0]} is not known to be"
    if config.all_reduce_dtype == "bfloat16":
        return "since TensorFlow's NCCL does not send bfloat16"
    split = placed.session_config.gpu_options.experimental.virtual_devices
    if any(len(gpu.memory_limit_mb) > 1 for gpu in split):
        return "since NCCL does not average between several towers on one GPU"
    return None
