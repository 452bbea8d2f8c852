"""--variable_update=auto: variables on the CPU or mirrored on GPUs, whichever averages faster by arithmetic."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config, PlanOptions
from tower_train.graph import context, cost, stream, towers
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import TowerDraws
from tower_train.graph.variables import Variables
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1


class Network(NamedTuple):
    """The properties of a network that decide.

    Attributes:
      num_parameters: number of trained weights.
      obstacle: why its variables cannot be mirrored; None if they can.
    """

    num_parameters: int
    obstacle: str | None = None


def resolve(
    config: Config, began_with: str | None, placed: Devices, look: Callable[[], Network]
) -> tuple[Config, list[str]]:
    """Replaces auto by a place of the variables, and None by an all-reduce.

    Args:
      config: all options.
      began_with: the place in the last start, which the run keeps; None for a new run.
      placed: the devices of the towers.
      look: inspects the network; called only if that decides.

    Returns:
      The config, and a line for each choice made for several GPUs.
    """
    update, why = config.variable_update, "as asked"
    if update == "auto":
        update, why = _choose(config, began_with, placed, look)
        config = dataclasses.replace(config, variable_update=update)
    if len(placed.gpus) < 2:
        return config, []
    lines = [f"variable_update: {update}, {why}"] if why != "as asked" else []
    if update == cost.MIRRORED and config.all_reduce is None:
        obstacle = _nccl_obstacle(config, placed)
        config = dataclasses.replace(config, all_reduce="collective" if obstacle else "nccl")
        lines.append(f"all_reduce: {config.all_reduce}, {obstacle or f'between {len(placed.gpus)} GPUs'}")
    return config, lines


def _choose(config: Config, began_with: str | None, placed: Devices, look: Callable[[], Network]) -> tuple[str, str]:
    """Returns (mode, reason)."""
    if config.all_reduce is not None:
        return cost.MIRRORED, "for --all_reduce"
    if len(placed.towers) > 1 and placed.num_workers == 1:  # else there are copies in both modes
        if config.check_mirrors_every_steps:
            return cost.MIRRORED, "for --check_mirrors_every_steps"
        if config.all_reduce_dtype != "same":
            return cost.MIRRORED, "for --all_reduce_dtype"
    if began_with in (cost.CPU, cost.MIRRORED):
        return began_with, "as the run began"
    if len(placed.gpus) < 2:
        return cost.CPU, "without several GPUs"
    network = look()
    size = network.num_parameters * towers.variable_dtype(tf.as_dtype(config.dtype)).size
    parameters = f"{network.num_parameters:,} parameters ({size / 1e6:.1f} MB), {len(placed.gpus)} GPUs"
    if network.obstacle:
        return cost.CPU, f"since {network.obstacle} ({parameters})"
    plan = PlanOptions(params=max(1, size / 4), towers=len(placed.gpus), all_reduce_dtype=config.all_reduce_dtype)
    secs = {mode: cost.step(plan, mode, plan.towers, 1).local_secs for mode in (cost.CPU, cost.MIRRORED)}
    return min(secs, key=secs.get), (
        f"since {parameters}: weights and gradients take {1e3 * secs[cost.CPU]:.2f} ms a step by way of the CPU, "
        f"gradients {1e3 * secs[cost.MIRRORED]:.2f} ms between the GPUs (computed, as by tower_train.plan)"
    )


def _nccl_obstacle(config: Config, placed: Devices) -> str | None:
    """Returns why NCCL cannot average between these GPUs; None if it can."""
    unknown = [gpu.name for gpu in placed.gpus if gpu.capability is None]
    if unknown:
        return f"since NCCL is for NVIDIA's GPUs, which {unknown[0]} is not known to be"
    if config.all_reduce_dtype == "bfloat16":
        return "since TensorFlow's NCCL does not send bfloat16"
    if any(len(own.memory_limit_mb) > 1 for own in placed.session_config.gpu_options.experimental.virtual_devices):
        return "since NCCL does not average between several towers on one GPU"
    return None


def look_at(workload: Workload, examples: Examples, config: Config) -> Network:
    """Builds one tower without gradients in a separate graph, and tries to mirror its variables; GraphError if the
    network breaks a rule of the towers."""
    workload, dtype = workload.for_examples(examples), tf.as_dtype(config.dtype)
    with tf.Graph().as_default(), tf.device(HOST):
        split, start = stream.Split(config.tower_batch, 1), tf.zeros([], tf.int64)
        source = stream.training_stream(workload, examples, config.seed, start, split)
        variables, draws = Variables((HOST, HOST), 1), TowerDraws("look", source.firsts[0], config.tower_batch)
        with towers.scope(0, HOST, variables, towers.restored), context.Context().of_tower(0, draws):
            towers.tower_loss(workload, *source.batches[0], dtype, training=True)
        count = functools.partial(Network, sum(math.prod(variable.shape) for variable in v1.trainable_variables()))
        try:
            with variables.of_tower(1):
                variables.weight_decays()
        except errors.GraphError as error:
            return count(str(error).partition(". ")[0])
        return count()
