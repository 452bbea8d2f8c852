"""Chooses the options that are left to the machine: dtype, place of the variables, all-reduce, time-out of stalls."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tower_train import host
from tower_train.config import Config
from tower_train.graph.devices import Devices, Gpu

# the compute capabilities of the first NVIDIA GPUs with fast instructions for a dtype
_MADE_FOR = {"bfloat16": (8, 0), "float16": (7, 0), "float32": (0, 0)}
_SLOW = "--dtype=float16 is for GPUs: on a processor its convolutions can take hundreds of times as long as in float32."
_CHECK_MIXED_EVERY_STEPS = 100
_STALL_TIMEOUT_SECS = 1800.0  # the first step of some GPUs compiles for many minutes


def resolve(config: Config, before: Mapping[str, Any], placed: Devices) -> tuple[Config, list[str]]:
    """Replaces `auto`, and None in options that depend on the devices; also returns a line for each choice.

    Args:
      config: all options.
      before: those of the run's last start, which chose for the whole run; empty for a new run.
      placed: the devices of the towers.
    """
    # an elastic group may have its greatest size in the next start, with the same options
    placed = dataclasses.replace(placed, num_workers=config.most_workers or placed.num_workers)
    chosen, notes = {}, []
    if config.dtype == "auto":
        chosen["dtype"], why = _dtype(before, placed.gpus)
        notes.append(f"dtype: {chosen['dtype']}, {why}")
    elif config.dtype == "float16" and not placed.gpus:
        notes.append(f"*** {_SLOW}")
    update = config.variable_update
    if update == "auto":
        update, why = _variable_update(config, before, placed)
        notes += [f"variable_update: {update}, {why}"] if placed.gpus else []
    is_between_gpus = update == "mirrored" and len(placed.gpus) > 1
    if is_between_gpus and config.all_reduce is None:
        obstacle = _nccl_obstacle(placed)
        chosen["all_reduce"] = "collective" if obstacle else "nccl"
        notes.append(f"all_reduce: {chosen['all_reduce']}, {obstacle or f'between {len(placed.gpus)} GPUs'}")
    models = dict.fromkeys(gpu.name for gpu in placed.gpus)
    if is_between_gpus and len(models) > 1:
        notes.append(f"*** GPUs of different models ({', '.join(models)}): the slowest sets the pace of all.")
        if not config.check_mirrors_every_steps and not config.elastic:
            chosen["check_mirrors_every_steps"] = _CHECK_MIXED_EVERY_STEPS
            # their kernels may round differently
            notes[-1] += f" Their copies of the variables are compared every {_CHECK_MIXED_EVERY_STEPS} steps."
    chosen["jit_compile"] = "always" if placed.compiles(config.jit_compile) else "never"
    if chosen["jit_compile"] == "always":
        notes.append("jit_compile: towers and updates by XLA, before the first step, which may take minutes")
    if config.stall_timeout_secs is None:  # none, unless devices wait for each other
        chosen["stall_timeout_secs"] = _STALL_TIMEOUT_SECS if placed.num_workers > 1 or is_between_gpus else 0.0
    return dataclasses.replace(config, variable_update=update, **chosen), notes


def _dtype(before: Mapping[str, Any], gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Returns (dtype, reason)."""
    if "dtype" in before:
        return before["dtype"], "as the run began"
    if gpus:
        return gpu_dtype(gpus)
    instructions = host.bfloat16_instructions()
    if instructions is None:
        return "float32", f"since {host.CPUINFO} does not tell this processor's instructions"
    if instructions:
        return "bfloat16", f"since this processor has fast instructions for it ({instructions})"
    return "float32", "since this processor has no fast bfloat16 instructions"


def gpu_dtype(gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Returns (dtype, reason) for GPUs: the fastest dtype that all of them are made for."""
    for name, capability in gpus:
        if capability is None:
            return "float32", f"since the compute capability of {name} is not known"
    name, capability = min(gpus, key=lambda gpu: gpu.capability)
    dtype = next(dtype for dtype, least in _MADE_FOR.items() if capability >= least)
    return dtype, f"since {name} has compute capability {'.'.join(map(str, capability))}"


def _variable_update(config: Config, before: Mapping[str, Any], placed: Devices) -> tuple[str, str]:
    """Returns (place of the variables, reason)."""
    if config.all_reduce is not None:
        return "mirrored", "for --all_reduce"
    if len(placed.towers) > 1 and placed.num_workers == 1 and config.check_mirrors_every_steps:
        return "mirrored", "for --check_mirrors_every_steps"  # several workers have copies in both modes
    if before.get("variable_update") in ("cpu", "mirrored"):
        return before["variable_update"], "as the run began"
    # A lone GPU too: with its variables on the host, copies take half of ResNet-50's step.
    return ("mirrored", "on the GPUs") if placed.gpus else ("cpu", "for towers on the CPU")


def _nccl_obstacle(placed: Devices) -> str | None:
    """Returns why NCCL cannot average between these GPUs; None if it can."""
    unknown = [gpu.name for gpu in placed.gpus if gpu.capability is None]
    if unknown:
        return f"since NCCL is for NVIDIA's GPUs, which {unknown[0]} is not known to be"
    split = placed.session_config.gpu_options.experimental.virtual_devices
    if any(len(gpu.memory_limit_mb) > 1 for gpu in split):
        return "since NCCL does not average between several towers on one GPU"
    return None
