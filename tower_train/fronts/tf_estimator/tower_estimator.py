"""The Estimator: the library's, with a tower per device in training and the workers of TF_CONFIG."""

import contextlib
import functools
import types

import keras
import tensorflow as tf
from tensorflow.python.training import training as training_module

from tower_train import console, errors
from tower_train.fronts import compat, meeting, placement
from tower_train.fronts.tf_estimator import inputs, library, proof, workers
from tower_train.fronts.tf_estimator.towers import ModelTowers
from tower_train.fronts.tf_estimator.training import Training
from tower_train.graph import devices, xla

v1 = tf.compat.v1
TRAIN = library.api.ModeKeys.TRAIN
_model_to_estimator = library.keras_lib.model_to_estimator  # programs may put ours in its place
_OF_A_WORKER = 1_000_003  # numbers of draws without a seed


class _Counted(v1.train.SessionRunHook):
    """Counts the steps of a training."""

    steps: int | None = None  # until a session is made: there may be nothing left to train

    def after_create_session(self, session, coord):
        self.steps = self.steps or 0

    def after_run(self, run_context, run_values):
        self.steps += 1


class Estimator(library.estimator.Estimator):
    """Trains and evaluates a model that is written as a function: the library's Estimator, trained on towers.

    To train, model_fn is called once a tower, on the next batch of input_fn's data set. Variables that it makes with
    get_variable, tf.Variable or Keras layers are made once, and are assigned to once: what Keras layers assign is the
    mean over towers, other assignments are the first tower's. Where it computes gradients of variables, by an
    optimizer, tf.gradients or a tape, it gets the mean of all towers', weighted by their examples, and may clip it or
    add noise. An optimizer's apply_gradients applies it there and then, once, by the op that the call returns.

    Under a TF_CONFIG of several workers each calls `train`, trains on its own input_fn's batches, and ends after the
    same step: the last for which all have batches, or after which a hook asked for the end. Only the chief reads and
    writes model_dir; all begin with its values. An argument input_context of input_fn is a tf.distribute.InputContext,
    for dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).

    Arguments and errors are the library's; faults of towers or workers raise a UserError.
    """

    # Towers take the place of strategies.
    _train_distribution = _eval_distribution = property(lambda self: None, lambda self, strategy: None)
    _device_fn = property(lambda self: self._config.device_fn or devices.HOST, lambda self, function: None)
    _training: Training | None = None  # while `train` runs
    _is_compared = False  # whether a training has compared its towers with one device

    @functools.cached_property
    def _placed(self) -> devices.Devices:
        """The towers' devices. Evaluation, prediction and export take the first."""
        placed = placement.place(self._config.towers, "num_gpus", in_session=True)
        if self._config.is_compiled(placed):
            xla.leave_to_xla(placed.session_config)
        self._session_config = workers.merged(placed.session_config, self._session_config)
        return placed

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None) -> "Estimator":
        if not self._is_compared:
            proof.compare_first(self, input_fn)
            self._is_compared = True
        cluster = workers.join(self._config, self._placed)
        training = Training(self._placed, cluster, self._config.batch_norm, self._config.is_compiled(self._placed))
        open_session = functools.partial(workers.open_session, training, max_steps)
        counted = _Counted()
        with contextlib.ExitStack() as stack:
            stack.enter_context(compat.replaced(self, "_training", training))
            if training.cluster:
                if max_steps:  # the chief knows whether there is anything to train
                    hooks, max_steps = [*(hooks or []), v1.train.StopAtStepHook(last_step=max_steps)], None
                if not training.cluster.is_chief:
                    stack.enter_context(compat.replaced(self, "_warm_start_settings", None))
                stack.enter_context(compat.replaced(training_module, "MonitoredTrainingSession", open_session))
            super().train(input_fn, [*(hooks or []), counted], steps, max_steps, saving_listeners)
        if training.num_towers > 1 and counted.steps == 0:
            console.notice(
                f"*** No step was done. If input_fn has ended: a step takes a batch for each of {training.num_towers} "
                "towers. Let it give smaller batches, or more."
            )
        return self

    def _create_and_assert_global_step(self, graph):
        with v1.device(devices.HOST):  # in one file of an export, with the variables
            return super()._create_and_assert_global_step(graph)

    def _call_input_fn(self, input_fn, mode, input_context=None):
        context = tf.distribute.InputContext()
        if mode == TRAIN and self._config.num_worker_replicas:
            workers_of_all = self._config.num_worker_replicas
            towers_of_all = workers_of_all * len(self._placed.towers)
            context = tf.distribute.InputContext(workers_of_all, self._config.global_id_in_cluster, towers_of_all)
        return super()._call_input_fn(input_fn, mode, context)

    def _get_features_and_labels_from_input_fn(self, input_fn, mode):
        training = self._training
        if mode != TRAIN or not training or training.num_towers == 1:
            return super()._get_features_and_labels_from_input_fn(input_fn, mode)
        dataset = self._call_input_fn(input_fn, mode)
        training.batches = inputs.Batches(dataset, len(self._placed.towers), training.all_reduce)
        compat.skip_draws(training.worker * _OF_A_WORKER)  # else draws that are not cut are the same in all workers
        return training.batches, None, training.batches.hooks

    def _call_model_fn(self, features, labels, mode, config):
        call = functools.partial(super()._call_model_fn, mode=mode, config=config)
        if meeting.current():  # of the model_fn of an Estimator that calls this one's
            return call(features, labels)
        training = (self._training if mode == TRAIN else None) or Training(
            self._placed, is_compiled=self._config.is_compiled(self._placed)
        )
        batches = features if isinstance(features, inputs.Batches) else [(features, labels)]
        with v1.device(self._device_fn):
            towers = ModelTowers(training, self._placed.towers[: len(batches)], batches, self._config.tf_random_seed)
            training.averages.losses_add_up = functools.partial(library.is_summed, self._model_fn)
            return towers.call(call, mode)


class TPUEstimator(Estimator):
    """tf.estimator.tpu.TPUEstimator without a TPU: an Estimator whose functions find their batch size in params.

    As on a TPU, train_batch_size counts the examples of a whole step, and each tower takes its share.
    """

    def __init__(
        self,
        model_fn=None,
        model_dir=None,
        config=None,
        params=None,
        use_tpu=True,
        train_batch_size=None,
        eval_batch_size=None,
        predict_batch_size=None,
        batch_axis=None,
        warm_start_from=None,
        **_of_tpus,
    ):
        if use_tpu:
            raise errors.ConfigError(
                "TPUEstimator(use_tpu=True): TPUs are not supported. Give use_tpu=False, to train on GPUs or the CPU."
            )
        names = library.estimator.function_utils.fn_args(model_fn)

        def returning_spec(features, labels, mode, params, config):
            given = {"mode": mode, "params": params, "config": config}
            given = {name: value for name, value in given.items() if name in names}
            if labels is not None or "labels" in names:
                given["labels"] = labels
            spec = model_fn(features, **given)
            return spec.as_estimator_spec() if isinstance(spec, library.api.tpu.TPUEstimatorSpec) else spec

        super().__init__(returning_spec, model_dir, config, params or {}, warm_start_from)
        modes, towers = library.api.ModeKeys, self._config.num_towers * max(1, self._config.num_worker_replicas)
        if (train_batch_size or 0) % towers:
            raise errors.ConfigError(
                f"TPUEstimator(train_batch_size={train_batch_size}): it is shared by {towers} towers. Give a multiple "
                f"of {towers}."
            )
        share = train_batch_size and train_batch_size // towers
        self._batch_sizes = {TRAIN: share, modes.EVAL: eval_batch_size, modes.PREDICT: predict_batch_size}

    def _call_input_fn(self, input_fn, mode, input_context=None):
        with self._batch_size_in_params(mode):
            return super()._call_input_fn(input_fn, mode, input_context)

    def _call_model_fn(self, features, labels, mode, config):
        with self._batch_size_in_params(mode):
            return super()._call_model_fn(features, labels, mode, config)

    def _batch_size_in_params(self, mode) -> contextlib.AbstractContextManager:
        size = self._batch_sizes[mode]
        return compat.replaced(self, "_params", self._params | ({"batch_size": size} if size else {}))


def model_to_estimator(keras_model=None, *args, checkpoint_format: str = "saver", **kwargs) -> Estimator:
    """Makes an Estimator that trains a compiled model of Keras 2 (tf_keras): the library's function, with its arguments
    and errors. The model's optimizer is one of tf_keras.optimizers.legacy or tf.compat.v1.train.

    Raises ConfigError for a model of Keras 3.
    """
    if isinstance(keras_model, keras.Model):
        raise errors.ConfigError(
            "model_to_estimator: the model is one of Keras 3, and Estimators take those of Keras 2. Make it by "
            "tf.keras, with TF_USE_LEGACY_KERAS=1 in the environment before tensorflow is imported, or train it by "
            "tower_train.multi_gpu_model."
        )
    return _model_to_estimator(keras_model, *args, checkpoint_format=checkpoint_format, **kwargs)


def on_towers(module: types.ModuleType) -> dict[str, type]:
    """Returns {name: class} of the library's Estimators in a module, as classes whose Estimators train on towers."""
    return {
        name: type(name, (Estimator, cls), {"__doc__": cls.__doc__})
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, Estimator.__base__) and cls is not Estimator.__base__
    }


# Where the library makes its own, such as in add_metrics, it makes these.
library.estimator.Estimator, library.run_config.RunConfig = Estimator, workers.RunConfig
