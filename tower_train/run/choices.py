"""The values of options that are left to the machine: dtype, place of the variables, all-reduce, time-out of stalls."""

import dataclasses
from collections.abc import Sequence

from tower_train import host
from tower_train.config import Config
from tower_train.graph.devices import Devices, Gpu

_AMPERE, _VOLTA = (8, 0), (7, 0)  # compute capabilities of the first NVIDIA GPUs made for bfloat16, and for float16
_SLOW = "--dtype=float16 is for GPUs: on a processor its convolutions can take hundreds of times as long as in float32."
_STALL_TIMEOUT_SECS = 1800.0  # the first step of some GPUs compiles for many minutes


def resolve_dtype(dtype: str, began_with: str | None, gpus: Sequence[Gpu]) -> tuple[str, list[str]]:
    """Replaces --dtype=auto: bfloat16 on devices with fast instructions for it, float16 on older GPUs, else float32.

    Args:
      dtype: --dtype of this start.
      began_with: the dtype of earlier starts, which the run keeps; None for a new run.
      gpus: those that carry towers; none for towers on the CPU.

    Returns:
      The dtype, and a line about the choice and its reason, or that it suits GPUs only, if there is one.
    """
    if dtype != "auto":
        return dtype, [f"*** {_SLOW}"] if dtype == "float16" and not gpus else []
    if began_with:
        dtype, why = began_with, "as the run began"
    else:
        dtype, why = of_gpus(gpus) if gpus else of_processor()
    return dtype, [f"dtype: {dtype}, {why}"]


def of_processor() -> tuple[str, str]:
    """Returns (dtype, reason) for this machine's processor."""
    instructions = host.bfloat16_instructions()
    if instructions is None:
        return "float32", f"since {host.CPUINFO} does not tell this processor's instructions"
    if instructions:
        return "bfloat16", f"since this processor has fast instructions for it ({instructions})"
    return "float32", "since this processor has no fast bfloat16 instructions"


def of_gpus(gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Returns (dtype, reason) for GPUs."""
    for name, capability in gpus:
        if capability is None:
            return "float32", f"since the compute capability of {name} is not known"
    name, capability = min(gpus, key=lambda gpu: gpu.capability)
    if capability >= _AMPERE:
        return "bfloat16", f"since {name if len(gpus) == 1 else 'every GPU used'} has arithmetic for it"
    dtype, lacking, least = (
        ("float16", "bfloat16 arithmetic", _AMPERE)
        if capability >= _VOLTA
        else ("float32", "fast arithmetic in float16", _VOLTA)
    )
    known, least = (".".join(map(str, each)) for each in (capability, least))
    return dtype, f"since {name} has no {lacking} (compute capability {known}, below {least})"


def resolve_variable_update(config: Config, began_with: str | None, placed: Devices) -> tuple[Config, list[str]]:
    """Replaces --variable_update=auto (towers on GPUs have their variables there) and an --all_reduce of None.

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


def stall_timeout_secs(config: Config, placed: Devices) -> float:
    """Returns --stall_timeout_secs, or its default: 0, for none, unless devices wait for each other."""
    if config.stall_timeout_secs is not None:
        return config.stall_timeout_secs
    is_between_gpus = config.variable_update == "mirrored" and len(placed.gpus) > 1
    return _STALL_TIMEOUT_SECS if placed.num_workers > 1 or is_between_gpus else 0.0
