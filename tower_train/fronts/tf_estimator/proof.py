"""Shows on a few examples that the towers of an Estimator train what one device trains."""

import contextlib
import copy
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import inputs, library
from tower_train.graph.devices import HOST
from tower_train.proof import comparison, operations
from tower_train.proof.comparison import STEPS, Arrays, Outcome, Values
from tower_train.proof.operations import setter

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
    return _compared(estimator, input_fn, devices).proved().line


def compare_first(estimator, input_fn: Callable) -> None:
    """As `check`, before the first training, of at most four towers; prints the line, of several workers the chief. A
    comparison that cannot be is none."""
    devices = _devices(estimator)[: comparison.MOST_TOWERS]
    if len(devices) == 1 or estimator.config.check_towers == "never":
        return
    say = console.say if estimator.config.is_chief else lambda line: None
    with compat.random_states_kept():
        say(comparison.before_training(lambda: _compared(estimator, input_fn, devices, say), _HOW_NOT).line)


def _devices(estimator) -> tuple[str, ...]:
    """Returns the devices for all workers' towers, in this process."""
    return tuple(estimator._placed.towers) * max(estimator.config.num_worker_replicas, 1)


def _compared(
    estimator, input_fn: Callable, devices: Sequence[str], say: Callable[[str], None] | None = None
) -> Outcome:
    """Compares in float64 if model_fn can be computed so, else in its own dtypes. say: tells that it takes long, and is
    then of less; None if all of it was asked for."""
    with tempfile.TemporaryDirectory() as folder:
        examples = _Examples(estimator, input_fn, folder, STEPS * comparison.EACH * len(devices))
        each = comparison.examples_of_tower(examples.number, len(devices))

        def compare(dtype: str | None) -> Outcome:
            train, count = functools.partial(_train, examples, estimator, dtype), len(devices)
            size = each * count
            began = time.monotonic()
            one = train(devices[:1], size)
            if say and comparison.announce(2, 3 * (time.monotonic() - began), _HOW_NOT, say):
                count, size = 2, 2 * max(1, each // 2)
                one = train(devices[:1], size)
            first, done = one.after[0].variables, [one.after]
            comparison.check_memory(sum(value.size for value in first.values()), one.dtype.name)

            def train_one(begin: Arrays) -> list[Values]:
                return done.pop() if done else train(devices[:1], size, first | begin).after

            def several(begin: Arrays, batch_norm: str = "global") -> list[Values]:
                return train(devices[:count], size // count, first | begin, batch_norm).after

            is_by_tower = estimator.config.batch_norm == "tower"
            return comparison.Comparison(
                train_one,
                several,
                one.weights,
                one.dtype,
                count,
                f"{STEPS} steps of {size} examples, {one.dtype.name}",
                by_tower=functools.partial(several, batch_norm="tower") if is_by_tower else None,
            ).outcome()

        return comparison.in_dtypes(["float64", None], compare)


class _Examples:
    """The first examples of a data set, saved, as a shuffled one would give each training others."""

    def __init__(self, estimator, input_fn: Callable, folder: str, number: int):
        """folder: for all that a comparison writes."""
        self.folder, self._path = folder, f"{folder}/examples"
        with compat.eager_mode(), tf.device(HOST):  # a GPU would compute the count of `take`
            dataset = inputs.checked(estimator._call_input_fn(input_fn, library.api.ModeKeys.TRAIN))
            dataset.unbatch().take(number).save(self._path)
            self.number = int(tf.data.Dataset.load(self._path).cardinality())
        sizes = [tf.compat.dimension_value(leaf.shape[0]) for leaf in tf.nest.flatten(dataset.element_spec)]
        # batches' shapes tell their size only if they do in the training: a program may go another way then
        self._is_fixed = None not in sizes

    def batches(self, size: int, dtype: str | None) -> tf.data.Dataset:
        """Returns whole batches, over and over; floating-point numbers in a dtype, None for their own."""

        def cast(value):
            return tf.cast(value, dtype) if dtype and value.dtype.is_floating else value

        dataset = tf.data.Dataset.load(self._path).take(self.number // size * size)
        dataset = dataset.batch(size, drop_remainder=self._is_fixed)
        dataset = dataset.map(lambda *parts: tf.nest.map_structure(cast, parts if len(parts) > 1 else parts[0]))
        return dataset.repeat()  # a hook that runs an op, as those of GANs, takes a batch for it


def _train(
    examples: _Examples,
    estimator,
    dtype: str | None,
    towers: Sequence[str],
    size: int,
    begin: Arrays | None = None,
    batch_norm: str = "global",
) -> "_Variables":
    """Trains an Estimator, which begins with these values of its variables, on batches of a size a tower.

    Returns the hook that saw its values. dtype: of the examples' numbers; None for their own.
    """
    config, twin, hook = estimator.config, copy.copy(estimator), _Variables(begin or {})
    twin._placed = dataclasses.replace(estimator._placed, towers=tuple(towers))
    twin._model_dir = tempfile.mkdtemp(dir=examples.folder)
    if dtype or not config.is_chief:
        twin._warm_start_settings = None  # values of other dtypes, and the chief alone may be able to read them
    twin._config = config.alone(
        model_dir=twin._model_dir,
        batch_norm=batch_norm,
        check_towers="never",
        save_checkpoints_secs=None,
        save_checkpoints_steps=None,
        save_summary_steps=None,
        log_step_count_steps=None,
        tf_random_seed=1 if config.tf_random_seed is None else config.tf_random_seed,
    )
    floats = compat.floatx(dtype) if dtype else contextlib.nullcontext()
    with floats, contextlib.suppress(v1.train.NanLossDuringTrainingError):  # the values after that are none
        twin.train(lambda: examples.batches(size, dtype), hooks=[hook], steps=STEPS)
    lost = Values({}, {}, {name: value * np.nan for name, value in hook.after[0].variables.items()})
    hook.after += [lost] * (STEPS + 1 - len(hook.after))
    return hook


class _Variables(v1.train.SessionRunHook):
    """Begins a training with values of its variables, and keeps those at first and after each step."""

    def __init__(self, begin: Arrays):
        """begin: others have initial ones."""
        self._begin = begin

    def begin(self):
        self._variables = {v.op.name: v for v in v1.global_variables() if v.dtype.base_dtype != tf.string}
        self._assign = setter(self._variables)
        trained = {v.op.name: v for v in v1.trainable_variables()}
        self.weights = list(trained)  # their names
        summaries = [each.op for each in v1.get_collection(v1.GraphKeys.SUMMARIES) if each.op.name.startswith("loss")]
        losses = [op.inputs[1] for op in summaries if op.type == "ScalarSummary"]  # loss_1, if an op is called loss
        holders = [v.handle.op if hasattr(v, "handle") else v.op for v in trained.values()]
        dtypes = [v.dtype.base_dtype for v in trained.values() if v.dtype.is_floating]
        dtypes += [operations.least_exact(losses, holders).dtype] if losses else []
        # Of the arithmetic: that of v1.losses is float32 whatever the variables' is.
        self.dtype = np.dtype(min(dtypes, key=lambda each: each.size, default=tf.float32).as_numpy_dtype)

    def after_create_session(self, session, coord):
        self._assign(session, self._begin)
        self.after = [Values({}, {}, session.run(self._variables))]

    def after_run(self, run_context, run_values):
        self.after.append(Values({}, {}, run_context.session.run(self._variables)))
