"""Shows on a few examples that the towers of an Estimator train what one device trains."""

import copy
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import inputs, library
from tower_train.fronts.tf_estimator.training import NonFiniteLossError
from tower_train.graph.devices import HOST
from tower_train.proof import first
from tower_train.proof.comparison import Training, Values, compare, is_scaled
from tower_train.proof.first import EACH, STEPS
from tower_train.proof.rounding import epsilon, least_exact, rounded
from tower_train.proof.trial import assign

v1 = tf.compat.v1
_HOW_NOT = "RunConfig(check_towers='never')"


def check(estimator, input_fn: Callable) -> str:
    """Compares two steps of an Estimator's towers with two of one device, from initial values on.

    They are on the first examples of input_fn's data set. model_dir stays as it is. Of several workers each compares by
    itself as many towers as all have.

    Returns:
      A line for people.

    Raises:
      ConfigError: there is one tower, or too few examples.
      DataError: input_fn gives no data set.
      GraphError: a variable differs by more than rounding.
    """
    devices = _devices(estimator)
    if len(devices) == 1:
        raise errors.ConfigError("check: it compares towers with one device. Give RunConfig(num_gpus=2) or more.")
    return _compared(estimator, input_fn, devices, console.say)


def compare_first(estimator, input_fn: Callable) -> None:
    """As `check`, before the first training, of at most four towers; prints the line, of several workers the chief. A
    comparison that cannot be is none."""
    devices = _devices(estimator)[: first.MOST_TOWERS]
    if len(devices) == 1 or estimator.config.check_towers == "never":
        return
    say = console.say if estimator.config.is_chief else lambda line: None
    with compat.random_states_kept():
        say(first.before_training(lambda: _compared(estimator, input_fn, devices, say, is_first=True), _HOW_NOT))


def _devices(estimator) -> tuple[str, ...]:
    """Returns the devices for all workers' towers, in this process."""
    return tuple(estimator._placed.towers) * max(estimator.config.num_worker_replicas, 1)


def _compared(
    estimator, input_fn: Callable, devices: Sequence[str], say: Callable[[str], None], is_first: bool = False
) -> str:
    """Compares in float64 if model_fn can be computed so, else in its own dtypes; returns a line for people."""
    with tempfile.TemporaryDirectory() as folder:
        examples = os.path.join(folder, "examples")
        each = first.examples_of_tower(
            _save_examples(estimator, input_fn, examples, STEPS * EACH * len(devices)), len(devices)
        )
        compare_in = functools.partial(_compared_in, folder, estimator, devices, each, say, is_first)
        return first.in_float64(compare_in, compat.floatx("float64"), None)


def _compared_in(
    folder: str, estimator, devices: Sequence[str], each: int, say: Callable[[str], None], is_first: bool,
    dtype: str | None,
) -> str:  # fmt: skip
    """Compares in a dtype, or in model_fn's own; returns a line for people."""
    config, count = estimator.config, len(devices)

    def rows(size: int) -> tf.data.Dataset:
        """Returns the examples in batches of a size."""

        def cast(value):
            return tf.cast(value, dtype) if dtype and value.dtype.is_floating else value

        dataset = tf.data.Dataset.load(os.path.join(folder, "examples")).batch(size, drop_remainder=True)
        dataset = dataset.map(lambda *parts: tf.nest.map_structure(cast, parts if len(parts) > 1 else parts[0]))
        return dataset.repeat()  # a hook that runs an op, as those of GANs, takes a batch for it

    def train(towers: int, batch_norm: str = "global", seed: int | None = None, begin: dict | None = None):
        """Does the steps; returns the hook that saw their values."""
        twin, hook = copy.copy(estimator), _Variables(begin, seed)
        twin._placed = dataclasses.replace(estimator._placed, towers=devices[:towers])
        twin._model_dir = tempfile.mkdtemp(dir=folder)
        if not config.is_chief:
            twin._warm_start_settings = None  # which the chief alone may be able to read
        twin._config = config.alone(
            model_dir=twin._model_dir, batch_norm=batch_norm, check_towers="never", save_checkpoints_secs=None,
            save_checkpoints_steps=None, save_summary_steps=None, log_step_count_steps=None,
            tf_random_seed=1 if config.tf_random_seed is None else config.tf_random_seed,
        )  # fmt: skip
        twin.train(lambda: rows(each * count // towers), hooks=[hook], steps=STEPS)
        return hook

    began = time.monotonic()
    try:
        one = train(1)
    except NonFiniteLossError:
        size = f"{STEPS} steps of {each * count} examples"
        return f"*** towers: nothing to compare: the loss is not finite, or its gradients ({size})"
    secs = time.monotonic() - began
    if is_first and first.announce(2, 3 * secs, _HOW_NOT, say):
        count, each = 2, max(1, each // 2)
        one = train(1)

    def train_one(seed: int | None) -> list[Values]:
        return done.pop() if done and seed is None else train(1, "global", seed, one.first).after

    def several(batch_norm: str) -> Training:
        return lambda _: train(count, batch_norm, None, one.first).after

    done, by_tower = [one.after], several("tower") if config.batch_norm == "tower" else None
    verdict = compare(train_one, several("global"), one.weights, epsilon(one.dtype), by_tower)
    return first.line_of_model(verdict, count, f"{STEPS} steps of {each * count} examples, {one.dtype.name}")


def _save_examples(estimator, input_fn: Callable, path: str, number: int) -> int:
    """Saves the first examples, as a shuffled data set would give each training others; returns how many."""
    with compat.eager_mode(), tf.device(HOST):  # a GPU would compute the count of `take`
        dataset = inputs.checked(estimator._call_input_fn(input_fn, library.api.ModeKeys.TRAIN))
        dataset.unbatch().take(number).save(path)
        return int(tf.data.Dataset.load(path).cardinality())


class _Variables(v1.train.SessionRunHook):
    """Begins a training with values of its variables, and keeps those after each step.

    Args:
      first: {name: value}; None for initial ones.
      seed: by which the weights among them are `rounded`; None: as they are.
    """

    def __init__(self, first: dict | None, seed: int | None):
        self.first, self._seed = first, seed
        self.after: list[Values] = []

    def begin(self):
        self._variables = {v.op.name: v for v in v1.global_variables() if v.dtype.base_dtype != tf.string}
        trained = {v.op.name: v for v in v1.trainable_variables()}
        self.weights = list(trained)  # their names
        summaries = [each.op for each in v1.get_collection(v1.GraphKeys.SUMMARIES) if each.op.name.startswith("loss")]
        losses = [op.inputs[1] for op in summaries if op.type == "ScalarSummary"]  # loss_1, if an op is called loss
        holders = [v.handle.op if hasattr(v, "handle") else v.op for v in trained.values()]
        dtypes = [v.dtype.base_dtype for v in trained.values() if v.dtype.is_floating]
        dtypes += [least_exact(losses, holders).dtype] if losses else []
        # Of the arithmetic: that of v1.losses is float32 whatever the variables' is.
        self.dtype = np.dtype(min(dtypes, key=lambda each: each.size, default=tf.float32).as_numpy_dtype)

    def after_create_session(self, session, coord):
        self.first = self.first or session.run(self._variables)
        values = dict(self.first)
        for name in self.weights if self._seed is not None else ():
            values[name] = rounded(values[name], epsilon(self.dtype), self._seed)
        assign(session, {name: v.initializer for name, v in self._variables.items()}, values)

    def after_run(self, run_context, run_values):
        values = run_context.session.run(self._variables)
        is_moved = not all(is_scaled(self.first[name], values[name]) for name in self.weights)
        self.after.append(Values(values, is_moved=is_moved))
