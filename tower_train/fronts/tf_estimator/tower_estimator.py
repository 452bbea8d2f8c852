"""The Estimator: the library's, with a tower per device in training and the workers of TF_CONFIG."""

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Iterator
from concurrent import futures

import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster.membership import Membership
from tower_train.fronts import compat, placement
from tower_train.fronts.tf_estimator import captured, inputs, library, towers, workers
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.graph import devices
from tower_train.graph.collectives import AllReduce

v1 = tf.compat.v1
TRAIN = library.ModeKeys.TRAIN
# Of this process with others, which keep what a key was used for. All have as many.
_trainings = itertools.count()
_SEED_STEP = 1_000_003  # between the graph seeds of workers


class Estimator(library.estimator.Estimator):
    """Trains and evaluates a model that is written as a function: the library's Estimator, trained on towers.

    To train, model_fn is called once a tower, on the next batch of input_fn's data set. Variables that it makes with
    get_variable, tf.Variable or Keras layers are made once, and are assigned to once a step: what Keras layers assign
    is the mean over towers, other assignments are the first tower's. The gradients that it gives to a
    tf.compat.v1.train optimizer are averaged and applied once.

    Under a TF_CONFIG of several workers each calls `train`, trains on its own input_fn's batches, and ends after the
    same step: the last for which all have batches, or after which a hook asked for the end. Only the chief reads and
    writes model_dir; all begin with its values. An argument input_context of input_fn is a tf.distribute.InputContext,
    for dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).

    Arguments and errors are the library's; what is wrong with towers or workers is a UserError.
    """

    # Towers take the place of strategies, and variables live on the host.
    _train_distribution = _eval_distribution = property(lambda self: None, lambda self, strategy: None)
    _device_fn = property(lambda self: self._config.device_fn or devices.HOST, lambda self, function: None)
    _training: "_Training | None" = None  # while `train` runs

    @functools.cached_property
    def _placed(self) -> devices.Devices:
        """The towers' devices. Evaluation, prediction and export take the first."""
        config = self._config
        placed = placement.place(config.towers, "num_gpus", in_session=True)
        if config.device_fn and len(placed.towers) > 1:
            raise errors.ConfigError(
                f"RunConfig: device_fn places the ops of one tower, and there are {len(placed.towers)}. Leave it out."
            )
        asked = self._session_config
        if asked.HasField("gpu_options") and "gpu" in placed.towers[0]:
            console.notice(
                "RunConfig: session_config.gpu_options have no effect, as GPUs are the same for all of a process. Use "
                "tf.config.set_visible_devices and tf.config.set_logical_device_configuration at its start."
            )
        self._session_config = _merged(placed, asked)
        return placed

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None) -> "Estimator":
        with workers.join(self._config, self._placed) as member:
            self._training = _Training(member.devices, member, steps, max_steps)
            try:
                if not member.task.is_alone and max_steps:  # the chief decides whether there is anything to train
                    hooks, max_steps = [*(hooks or []), v1.train.StopAtStepHook(last_step=max_steps)], None
                super().train(input_fn, hooks, steps, max_steps, saving_listeners)
            finally:
                self._training = None
            member.leave(None)
        return self

    def predict(self, *args, **kwargs) -> Iterator:
        """Yields predictions; see the library. The caller's graph and session stay as they are in between."""
        predictions, end = super().predict(*args, **kwargs), object()
        thread = futures.ThreadPoolExecutor(1)  # whose default graph the library changes
        try:
            while (prediction := thread.submit(next, predictions, end).result()) is not end:
                yield prediction
        finally:
            thread.submit(predictions.close)
            thread.shutdown(wait=False)

    def _export_all_saved_models(self, export_dir_base, *args, **kwargs) -> bytes:
        return super()._export_all_saved_models(os.fsdecode(export_dir_base), *args, **kwargs)

    def _train_model(self, input_fn, hooks, saving_listeners):
        return self._train_model_default(input_fn, hooks, saving_listeners)

    def _create_and_assert_global_step(self, graph):
        with v1.device(devices.HOST):
            return super()._create_and_assert_global_step(graph)

    def _call_input_fn(self, input_fn, mode, input_context=None):
        training = self._training if mode == TRAIN else None
        placed, count = (training.member.devices, len(self._placed.towers)) if training else (self._placed, 1)
        context = tf.distribute.InputContext(placed.num_workers, placed.worker, placed.num_workers * count)
        if not training:
            context = tf.distribute.InputContext()
        with inputs.arrays_outside_the_graph():
            return super()._call_input_fn(input_fn, mode, context)

    def _get_features_and_labels_from_input_fn(self, input_fn, mode):
        training = self._training
        if mode != TRAIN or not training:
            return super()._get_features_and_labels_from_input_fn(input_fn, mode)
        if training.num_towers == 1:
            features, labels, hooks = super()._get_features_and_labels_from_input_fn(input_fn, mode)
            return features, labels, [*hooks, training.guard]
        dataset = self._call_input_fn(input_fn, mode)
        batches = inputs.Batches(dataset, len(self._placed.towers), training.all_reduce)
        training.batches = batches
        seed, worker = self._config.tf_random_seed, training.member.devices.worker
        if seed is not None and worker:  # their input may be shuffled alike; their towers draw differently
            v1.set_random_seed(seed + worker * _SEED_STEP)
        return batches, None, [batches.hook, training.guard]

    def _call_model_fn(self, features, labels, mode, config):
        def call(features, labels):
            spec = super(Estimator, self)._call_model_fn(features, labels, mode, config)
            current = captured.current()
            if mode == TRAIN and current.num_towers > 1 and library.is_summed(self._model_fn):
                current.multiply_gradients()
                spec = spec._replace(loss=spec.loss * current.num_towers)
            return spec

        if captured.current():  # of the model_fn of an Estimator that calls this one's
            return call(features, labels)
        batches = features if isinstance(features, inputs.Batches) else [(features, labels)]
        places = self._placed.towers if isinstance(features, inputs.Batches) else self._placed.towers[:1]
        training = (self._training if mode == TRAIN else None) or _Training(self._placed)
        num_workers, seed = training.all_reduce.num_workers, self._config.tf_random_seed
        with v1.device(self._device_fn):
            specs, captures = towers.build_towers(call, batches, places, num_workers, seed)
            if mode != TRAIN:
                return specs[0]
            training.guard.step = step = towers.train_step(specs, captures, training.all_reduce)
            return specs[0]._replace(loss=step.loss, train_op=step.op)

    def _train_with_estimator_spec(self, spec, worker_hooks, hooks, global_step_tensor, saving_listeners):
        train, training = super()._train_with_estimator_spec, self._training
        if training.member.task.is_alone:
            return train(spec, worker_hooks, hooks, global_step_tensor, saving_listeners)
        member = training.member
        newest = self.latest_checkpoint() if member.task.is_chief else None
        done = library.estimator._load_global_step_from_checkpoint_dir(self._model_dir) if newest else 0
        last = done + training.steps if training.steps else training.max_steps
        sessions = workers.Sessions(member, self._config, training.batches, training.all_reduce, (int(done), last))
        spec = spec._replace(train_op=tf.group(spec.train_op, sessions.counting))
        config = copy.deepcopy(self._config)
        config._cluster_spec = tf.train.ClusterSpec({})  # the chief reports, not another worker
        with contextlib.ExitStack() as stack:
            replaced = {"_config": config, "_session_config": _merged(member.devices, self._session_config)}
            if not member.task.is_chief:
                replaced["_warm_start_settings"] = None
            for name, value in replaced.items():
                stack.enter_context(compat.replaced(self, name, value))
            stack.enter_context(library.opened_by(sessions.open))
            return train(spec, worker_hooks, hooks, global_step_tensor, saving_listeners)


class _Training:
    """A call of Estimator.train.

    Args:
      placed: this worker's devices.
      member: this process among the workers; None for an update that `train` does not do.
      steps, max_steps: of `train`.

    Attributes:
      num_towers: of all workers.
      guard: a hook of the session.
      batches: of several towers.
    """

    batches: inputs.Batches | None = None

    def __init__(
        self, placed: devices.Devices, member: Membership | None = None, steps: int | None = None,
        max_steps: int | None = None,
    ):  # fmt: skip
        self.member, self.steps, self.max_steps, self.guard = member, steps, max_steps, towers.FiniteGuard()
        num_workers = placed.num_workers
        self.num_towers = len(placed.towers) * num_workers
        kind = "collective" if num_workers > 1 else "add_n"
        name = f"training {next(_trainings) if num_workers > 1 else 0}"
        self.all_reduce = AllReduce((devices.HOST,), kind, num_workers=num_workers, name=name)


def _merged(placed: devices.Devices, asked: v1.ConfigProto) -> v1.ConfigProto:
    """Returns the ConfigProto of these devices with the other settings that were asked for."""
    proto = copy.deepcopy(placed.session_config)
    proto.MergeFrom(asked)
    devices.use_gpus_alike(proto)
    proto.device_filters[:] = placed.session_config.device_filters  # a session sees this worker's devices only
    return proto


def with_towers(cls: type) -> type:
    """Returns a canned Estimator's class whose Estimators are trained on towers."""
    about = {"__doc__": cls.__doc__, "__module__": "tower_train.estimator"}
    return type(cls.__name__, (Estimator, cls), about)


# Where the library makes its own, such as in add_metrics, it makes these.
library.estimator.Estimator, library.run_config.RunConfig = Estimator, RunConfig
