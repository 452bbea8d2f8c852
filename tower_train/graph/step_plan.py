"""The plan of a step: what is decided before its graph is built, so that no part of the graph has to choose."""

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.console import enumeration
from tower_train.examples import Examples
from tower_train.graph.devices import Devices
from tower_train.graph.layout import Layout, lay_out
from tower_train.graph.transfer import Transfer, choose_transfer
from tower_train.workload import Workload, softmax_cross_entropy

BALANCED = "balanced"
_MOST_NAMES = 10  # in a line


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step before it is built: options, and what follows from them, the data and the devices."""

    workload: Workload  # with the network and the loss that are trained
    examples: Examples
    config: Config  # settled: `auto` and None only for what is not used; parts of the graph get values of it
    layout: Layout
    transfer: Transfer
    all_reduce: str  # kind of all-reduce between copies of the variables
    class_weights: np.ndarray | None  # factors of examples in the loss, by class
    session_config: tf.compat.v1.ConfigProto

    @property
    def dtype(self) -> tf.DType:
        """Of the arithmetic."""
        return tf.as_dtype(self.config.dtype)

    @property
    def is_compiled(self) -> bool:
        """Returns whether XLA compiles towers and updates."""
        return self.config.jit_compile == "always"


def plan_step(workload: Workload, examples: Examples, config: Config, devices: Devices) -> StepPlan:
    """Plans a step, with the last choices that are left open: those which depend on the examples.

    Raises ConfigError for an option that is of no use for this network, data or layout.
    """
    layout = lay_out(devices, config)
    if layout.num_replicas == 1 and config.check_mirrors_every_steps:
        raise errors.ConfigError(
            f"--check_mirrors_every_steps={config.check_mirrors_every_steps}: there is one copy of the variables. The "
            "option is for several workers, or for --variable_update=mirrored with several towers."
        )
    # a network may be made for its examples: their shapes, their number of classes
    workload = _with_smooth_labels(workload.for_examples(examples), config.label_smoothing)
    end = config.last_step(examples.num_examples) * layout.global_batch
    is_compiled = config.jit_compile == "always"
    transfer = choose_transfer(config.augment_on, workload, examples, layout.devices, end, is_compiled)
    # From here on there is one value where the options leave a choice: examples per tower or in all, steps or epochs.
    settled = dataclasses.replace(
        config,
        device="gpu" if devices.gpus else "cpu",
        augment_on="device" if transfer.augments_on_devices else "host",
        num_gpus=len(layout.devices),
        batch_size=layout.tower_batch,
        global_batch_size=None,
        max_steps=config.last_step(examples.num_examples),
        epochs=None,
        weight_decay=config.decay,
    )
    return StepPlan(
        workload,
        examples,
        settled,
        layout,
        transfer,
        config.all_reduce or "collective",
        parse_class_weights(config.class_weight, examples),
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


def parse_class_weights(text: str | None, examples: Examples) -> np.ndarray | None:
    """Returns the weights of classes of --class_weight, float64 [classes]; None without it.

    `balanced` is n / (k * count) for n examples of k classes, as in scikit-learn's compute_class_weight (after King and
    Zeng 2001, "Logistic regression in rare events data"). Classes without an example, and those not in a list of
    CLASS:WEIGHT, have weight 1. ConfigError if the classes are not known, or the list has others, or negative weights.
    """
    if text is None:
        return None
    names, labels = examples.class_names, examples.labels
    if labels is None and (text == BALANCED or not names):
        raise errors.ConfigError(
            f"--class_weight={text}: the classes of {examples.name} are not at hand before they are read. Give their "
            "labels as Examples(labels=), or class_names and weights such as --class_weight=0:1,1:2.5."
        )
    if labels is not None and labels.ndim > 1:
        raise errors.ConfigError(
            f"--class_weight={text}: examples of {examples.name} are of several classes at once. Weigh these in a loss "
            "of the workload."
        )
    labels = np.asarray([] if labels is None else labels, np.int64)  # bincount takes no uint64
    if labels.min(initial=0) < 0:
        raise errors.ConfigError(
            f"--class_weight={text}: {examples.name} has the label {labels.min()}. Classes are numbered from 0 on: "
            "renumber the labels, or weigh examples by tower_train.Weighted."
        )
    counts = np.bincount(labels, minlength=len(names))
    weights = np.ones(len(counts))
    if text == BALANCED:
        # a class without examples would weigh infinitely much
        there = counts > 0
        weights[there] = len(labels) / (there.sum() * counts[there])
        return weights
    for part in text.split(","):
        # from the right: a name may have a colon
        name, _, weight = part.rpartition(":")
        index = names.index(name) if name in names else int(name) if name.isdecimal() else len(weights)
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if index >= len(weights) or not 0 <= value < math.inf:
            classes = enumeration(names or [str(i) for i in range(len(weights))], _MOST_NAMES)
            raise errors.ConfigError(
                f"--class_weight={text}: {part!r} must be CLASS:WEIGHT, a class of {examples.name} by name or number, "
                f"and a weight of at least 0; or give {BALANCED}. The classes are {classes}."
            )
        weights[index] = value
    return weights
