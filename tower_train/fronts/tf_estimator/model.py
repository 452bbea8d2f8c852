"""The graphs of an Estimator: its model_fn, called for a mode on the batches of an input_fn."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.fronts.tf_estimator import model_towers
from tower_train.fronts.tf_estimator.captured import Captured
from tower_train.fronts.tf_estimator.inputs import Inputs
from tower_train.fronts.tf_estimator.model_fn import call_model_fn
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys
from tower_train.graph.collectives import AllReduce
from tower_train.graph.devices import HOST, Devices

v1 = tf.compat.v1
# Of this process with others, which keep what a key was used for. All have as many.
_trainings = itertools.count()
_SEED_STEP = 1_000_003  # between the graph seeds of workers


class Built(NamedTuple):
    """The towers of one graph.

    Attributes:
      specs: over towers.
      captures: their changes of variables.
      all_reduce: averages between workers.
      inputs: the source of their batches.
    """

    specs: list[EstimatorSpec]
    captures: list[Captured]
    all_reduce: AllReduce
    inputs: Inputs


class Model(NamedTuple):
    """A model_fn with its settings.

    Attributes:
      model_fn: the user's.
      params: passed on to model_fn and input_fn.
      config: likewise.
    """

    model_fn: Callable
    params: dict
    config: RunConfig

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Makes a new graph the default one within this block; ops are on the CPU, or by config.device_fn."""
        with tf.Graph().as_default(), v1.device(self.config.device_fn or HOST):
            v1.set_random_seed(self.config.tf_random_seed)
            v1.train.create_global_step()
            yield

    def build(self, mode: str, input_fn: Callable, placed: Devices) -> Built:
        """Builds one tower per device in the default graph, as one of several workers if `placed` says so, or raises
        UserError."""
        towers, workers, seed = len(placed.towers), placed.num_workers, self.config.tf_random_seed
        if self.config.device_fn and towers > 1:
            raise errors.ConfigError(
                f"RunConfig: device_fn places the ops of one tower, and there are {towers}. Leave it out."
            )
        context = tf.distribute.InputContext(workers, placed.worker, workers * towers)
        taken = {"mode": mode, "params": copy.deepcopy(self.params), "config": self.config, "input_context": context}
        all_reduce = AllReduce((HOST,), "collective", num_workers=workers, name=f"training {next(_trainings)}")
        inputs = Inputs(input_fn, taken, mode != ModeKeys.PREDICT, towers, all_reduce)
        if seed is not None and placed.worker:  # their input may be shuffled alike; their towers draw differently
            v1.set_random_seed(seed + placed.worker * _SEED_STEP)
        return Built(*self._towers(mode, inputs.next_batch, placed.towers), all_reduce, inputs)

    def build_for_export(self, mode: str, receiver) -> tuple[EstimatorSpec, tf.Operation | None]:
        """Builds the model on the inputs of an exported graph; returns its spec, and its step in mode TRAIN."""
        labels = getattr(receiver, "labels", None)
        specs, captures = self._towers(mode, lambda: (receiver.features, labels), (HOST,))
        return specs[0], model_towers.train_step(specs, captures).op if mode == ModeKeys.TRAIN else None

    def call(self, features, labels, mode: str) -> EstimatorSpec:
        """Calls the model_fn in the default graph."""
        return call_model_fn(self.model_fn, features, labels, mode, copy.deepcopy(self.params), self.config)

    def _towers(self, mode: str, next_batch: Callable, devices: tuple[str, ...]):
        def call(features, labels):
            return self.call(features, labels, mode)

        return model_towers.build_towers(call, next_batch, devices, self.config.tf_random_seed)
