"""Shows on a few examples that the towers of an Estimator train what one device trains."""

import contextlib
import copy
import dataclasses
import os
import tempfile
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep.draws import drawn_alike
from tower_train.fronts.tf_estimator import inputs
from tower_train.fronts.tf_estimator.tower_estimator import TRAIN, Estimator
from tower_train.fronts.tf_estimator.training import NonFiniteLossError
from tower_train.proof import rounding
from tower_train.proof.rounding import EACH, STEPS
from tower_train.proof.trial import assign

v1 = tf.compat.v1


def check(estimator: Estimator, input_fn: Callable) -> str:
    """Compares two steps of an Estimator's towers with two of one device, from initial values on.

    They are on the first examples of input_fn's data set. model_dir stays as it is.

    Returns:
      A line for people.

    Raises:
      ConfigError: there is one tower, or several workers; or too few examples.
      DataError: input_fn gives no data set.
      GraphError: a variable differs by more than rounding.
    """
    config, placed = estimator.config, estimator._placed
    count = len(placed.towers)
    if count == 1 or config.num_worker_replicas > 1:
        raise errors.ConfigError(
            "check: it compares the towers of one process with one device. Give RunConfig(num_gpus=2) or more, and no "
            "TF_CONFIG."
        )
    with tempfile.TemporaryDirectory() as folder:
        examples = os.path.join(folder, "examples")
        _save_examples(estimator, input_fn, examples, STEPS * EACH * count)

        def train(towers: int, alike: bool, first: dict | None = None) -> _Variables:
            def batches():
                rows = tf.data.Dataset.load(examples)
                return (rows.take(EACH).repeat(STEPS * count) if alike else rows).batch(EACH * count // towers)

            twin, variables = copy.copy(estimator), _Variables(first)
            twin._placed = dataclasses.replace(placed, towers=placed.towers[:towers])
            seed = 1 if config.tf_random_seed is None else config.tf_random_seed
            twin._model_dir = tempfile.mkdtemp(dir=folder)
            twin._config = config.replace(model_dir=twin._model_dir, tf_random_seed=seed)
            with drawn_alike(count) if alike else contextlib.nullcontext():
                twin.train(batches, hooks=[variables], steps=STEPS)
            return variables

        try:
            one = train(1, alike=False)
        except NonFiniteLossError:
            return rounding.not_finite(count)
        one.normalizes &= config.batch_norm == "tower"
        if one.normalizes:
            one = train(1, True, one.first)
        several = train(count, one.normalizes, one.first)

        def nearby(seed):
            near = dict(one.first)
            for name in one.weights if seed is not None else ():
                near[name] = rounding.rounded(near[name], rounding.epsilon(one.last[name].dtype), seed)
            return [*train(1, one.normalizes, near).last.values()]

        about = ", the same for each tower, as batch normalisation is by tower" * one.normalizes
        values = ([each.last[name] for name in one.last] for each in (one, several))
        before = {i: one.first[name] for i, name in enumerate(one.last) if name in one.weights}
        return rounding.compare_values(list(one.last), *values, nearby, before, count, about)


def _save_examples(estimator: Estimator, input_fn: Callable, path: str, number: int) -> None:
    """Saves the first examples, as a shuffled data set would give each training others."""
    with compat.eager_mode():
        inputs.checked(estimator._call_input_fn(input_fn, TRAIN)).unbatch().take(number).save(path)
        if tf.data.Dataset.load(path).cardinality() < number:
            raise errors.ConfigError(f"check: there are fewer than {number} examples, {EACH} a tower in {STEPS} steps.")


class _Variables(v1.train.SessionRunHook):
    """Begins a training with values of its variables, {name: value}, and keeps those at its end.

    Attributes:
      first, last: the values.
      weights: the names of the variables that are trained.
      normalizes: whether batches are normalised.
      is_exact: whether the loss is computed in float64.
    """

    def __init__(self, first: dict | None):
        self.first = first

    def as_exact(self, value: np.ndarray) -> np.ndarray:
        """Returns a value in float32 if the loss is computed in that, as by v1.losses, or in less."""
        return value if self.is_exact or value.dtype != np.float64 else value.astype(np.float32)

    def begin(self):
        self._variables = {v.op.name: v for v in v1.global_variables() if v.dtype.base_dtype != tf.string}
        self.weights = {v.op.name for v in v1.trainable_variables()}
        self.normalizes = any(map(_is_over_batch, v1.get_default_graph().get_operations()))
        summaries = [each.op for each in v1.get_collection(v1.GraphKeys.SUMMARIES) if each.op.name.startswith("loss")]
        losses = [op.inputs[1] for op in summaries if op.type == "ScalarSummary"]  # loss_1, if an op is called loss
        weights = [v.handle.op if hasattr(v, "handle") else v.op for v in v1.trainable_variables()]
        self.is_exact = not losses or rounding.least_exact(losses, weights).dtype == tf.float64

    def after_create_session(self, session, coord):
        self.first = self.first or session.run(self._variables)
        assign(session, {name: v.initializer for name, v in self._variables.items()}, self.first)

    def end(self, session):
        self.last = {name: self.as_exact(value) for name, value in session.run(self._variables).items()}


def _is_over_batch(op: tf.Operation) -> bool:
    """Returns whether an operation computes moments over its batch."""
    if op.type.startswith("FusedBatchNorm") and "Grad" not in op.type:  # of layer normalisation, rows are elsewhere
        return op.get_attr("is_training") and op.inputs[0].shape[0] != 1
    if op.type != "SquaredDifference" or op.inputs[1].op.type != "StopGradient":
        return False
    mean = op.inputs[1].op.inputs[0].op
    axes = tf.get_static_value(mean.inputs[1]) if mean.type == "Mean" else None
    return axes is not None and 0 in axes.reshape(-1)
