"""A workload to begin with: to which of three spirals does a point belong?

Train it:      python -m tower_train --workload=MODULE --num_gpus=2 --train_dir=runs/MODULE
Evaluate it:   python -m tower_train.evaluate --train_dir=runs/MODULE
Its options:   python -m tower_train --workload=MODULE --help
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tower_train import DataRequest, Examples, Workload
from tower_train.layers import batch_normalization
from tower_train.options import TRAINING, Options, option
from tower_train.workload import Draws

v1 = tf.compat.v1

CLASS_NAMES = ("first", "second", "third")


@dataclasses.dataclass(frozen=True)
class WorkloadOptions(Options):
    """This workload's own options, which the command line offers too."""

    # resume="same": a run does not resume with another value. "note": it does, and says so. "free": it does.
    units: int = option(64, "units of each hidden layer", TRAINING, allowed="at least 1", resume="same")


def examples(request: DataRequest) -> Examples:
    """Returns the data of request.split, 'train' or 'test': arrays whose first dimension counts examples.

    request.data_dir is --data_dir, if there is one. tower_train.data reads idx files and image folders.
    """
    rng = np.random.default_rng({"train": 0, "test": 1}[request.split])
    labels = rng.integers(len(CLASS_NAMES), size=3000)
    turn = rng.uniform(0, 1, len(labels))
    angle = 2 * np.pi * (labels / 3 + turn) + rng.normal(0, 0.1, len(labels))
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1).astype(np.float32)
    return Examples.from_arrays(f"spirals {request.split}", points, labels, CLASS_NAMES)


def augment(points: tf.Tensor, draws: Draws) -> tf.Tensor:
    """Changes training examples at random, by numbers that do not depend on the towers."""
    return points + 0.02 * (draws.uniform("shift", 2) - 0.5)


def inference(points: tf.Tensor, training: bool, units: int) -> tf.Tensor:
    """Builds the network: points [batch, 2] to logits [batch, 3].

    Called once per tower: create variables with tf.compat.v1.get_variable only, and do not depend on the tower.
    """
    hidden = points
    for i in (1, 2):
        with v1.variable_scope(f"hidden{i}"):
            hidden = tf.nn.relu(batch_normalization(_linear(hidden, units), training))
    with v1.variable_scope("softmax_linear"):
        return _linear(hidden, len(CLASS_NAMES))


def _linear(inputs: tf.Tensor, units: int) -> tf.Tensor:
    weights = v1.get_variable("weights", [inputs.shape[-1], units], inputs.dtype, regularizer=_decay)
    return inputs @ weights + v1.get_variable("biases", [units], inputs.dtype, v1.zeros_initializer())


def _decay(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weight decay of a variable, which counts once for all towers."""
    return 1e-5 * tf.nn.l2_loss(weights)


def workload(options: WorkloadOptions) -> Workload:
    """Makes the workload under these options."""
    return Workload(
        name="NAME",
        examples=examples,
        inference=lambda points, training: inference(points, training, options.units),
        augment=augment,
        options=options,
        configure=workload,
        # Values of the trainer's own options, unless the command line gives others.
        recipe={"optimizer": "adam", "learning_rate": 0.01, "max_steps": 300},
    )


WORKLOAD = workload(WorkloadOptions())
