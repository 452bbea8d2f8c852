"""The plan of a step: what is decided before its graph is built, so that no part of the graph has to choose."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.examples import Examples
from tower_train.graph import class_weights
from tower_train.graph.devices import Devices
from tower_train.graph.layout import Layout, lay_out
from tower_train.graph.transfer import Transfer, choose_transfer
from tower_train.workload import Workload, softmax_cross_entropy


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step before it is built: options, and what follows from them, the data and the devices."""

    workload: Workload  # with the network and the loss that are trained
    examples: Examples
    config: Config  # parts of the graph get values of it, never all
    layout: Layout  # towers, devices, copies of the variables, parts of the batch
    transfer: Transfer  # of the batches to their towers
    all_reduce: str  # between copies of the variables
    class_weights: np.ndarray | None  # factors of examples in the loss, by class
    session_config: tf.compat.v1.ConfigProto

    @property
    def dtype(self) -> tf.DType:
        """Of the arithmetic."""
        return tf.as_dtype(self.config.dtype)

    @property
    def coefficients(self) -> dict:
        """The optimizer's, without the learning rate."""
        names = ("momentum", "nesterov", "muon_iterations", "decay")
        return {name: getattr(self.config, name) for name in names}

    @property
    def is_compiled(self) -> bool:
        """Returns whether XLA compiles towers and updates."""
        return self.config.jit_compile == "always"


def plan_step(workload: Workload, examples: Examples, config: Config, devices: Devices) -> StepPlan:
    """Plans a step.

    Args:
      workload, examples: what is trained.
      config: without `auto`, except for choices that the data decide.
      devices: of this worker's towers.

    Raises:
      ConfigError: an option is of no use for this network, data or layout.
    """
    mirrored = config.variable_update == "mirrored"  # a lone tower too, if its variables are on its GPU
    layout = lay_out(devices, config.tower_batch, config.accumulate_steps, config.most_workers, mirrored)
    if layout.num_replicas == 1 and config.check_mirrors_every_steps:
        raise errors.ConfigError(
            f"--check_mirrors_every_steps={config.check_mirrors_every_steps}: there is one copy of the variables. The "
            "option is for several workers, or for --variable_update=mirrored with several towers."
        )
    workload = _with_smooth_labels(workload.for_examples(examples), config.label_smoothing)
    end = config.last_step(examples.num_examples) * layout.global_batch
    return StepPlan(
        workload,
        examples,
        config,
        layout,
        # the last choice of `auto`, as it depends on examples and network
        choose_transfer(config.augment_on, workload, examples, layout.devices, end),
        config.all_reduce or "collective",
        class_weights.parse(config.class_weight, examples),
        devices.session_config,
    )


def _with_smooth_labels(workload: Workload, label_smoothing: float) -> Workload:
    if not label_smoothing:
        return workload
    if workload.loss is not softmax_cross_entropy:
        raise errors.ConfigError(
            f"--label_smoothing={label_smoothing:g}: workload {workload.name} has a loss of its own: smooth there."
        )
    return dataclasses.replace(workload, loss=functools.partial(softmax_cross_entropy, label_smoothing=label_smoothing))
