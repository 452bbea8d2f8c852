"""The Estimator: the library's, with a tower per device in training and the workers of TF_CONFIG."""

import functools
import os
import types
from collections.abc import Iterator
from concurrent import futures

import tensorflow as tf
from tensorflow.python.training import training as training_module

from tower_train import errors
from tower_train.fronts import compat, placement
from tower_train.fronts.tf_estimator import captured, inputs, library, workers
from tower_train.fronts.tf_estimator.model_fn_towers import build_towers
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.training import Training, train_step
from tower_train.graph import devices

v1 = tf.compat.v1
TRAIN = library.api.ModeKeys.TRAIN
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"  # in checkpoints of models of Keras 2 that name objects, not variables
_OF_A_WORKER = 1_000_003  # numbers of draws without a seed


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
    _training: Training | None = None  # while `train` runs
    _exported: str | None = None  # the checkpoint, while it is exported
    _has_saver = False  # of its own, as model_fn was called last

    @functools.cached_property
    def _placed(self) -> devices.Devices:
        """The towers' devices. Evaluation, prediction and export take the first."""
        config = self._config
        placed = placement.place(config.towers, "num_gpus", in_session=True)
        if config.device_fn and len(placed.towers) > 1:
            raise errors.ConfigError(
                f"RunConfig: device_fn places the ops of one tower, and there are {len(placed.towers)}. Leave it out."
            )
        self._session_config = workers.merged(placed, self._session_config)
        return placed

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None) -> "Estimator":
        with workers.join(self._config, self._placed) as member:
            with compat.replaced(self, "_training", Training(member.devices, member, steps, max_steps)):
                if not member.task.is_alone and max_steps:  # the chief decides whether there is anything to train
                    hooks, max_steps = [*(hooks or []), v1.train.StopAtStepHook(last_step=max_steps)], None
                super().train(input_fn, hooks, steps, max_steps, saving_listeners)
            member.leave(None)
        return self

    def predict(self, *args, **kwargs) -> Iterator:
        """Yields predictions; see the library. The caller's graph and session stay as they are in between."""
        predictions, end = super().predict(*args, **kwargs), object()
        with futures.ThreadPoolExecutor(1) as thread:  # whose default graph the library changes
            try:
                while (prediction := thread.submit(next, predictions, end).result()) is not end:
                    yield prediction
            finally:
                thread.submit(predictions.close).result()

    def _maybe_warm_start(self, checkpoint_path):  # by evaluate and predict, after the call of model_fn
        super()._maybe_warm_start(checkpoint_path)
        self._compare_with_checkpoint(checkpoint_path)

    def _export_all_saved_models(
        self, export_dir_base, input_receiver_fn_map, assets_extra=None, as_text=False, checkpoint_path=None, **kwargs
    ) -> bytes:
        path = checkpoint_path or self.latest_checkpoint()
        with compat.replaced(self, "_exported", path):
            return super()._export_all_saved_models(
                os.fsdecode(export_dir_base), input_receiver_fn_map, assets_extra, as_text, path, **kwargs
            )

    def _create_and_assert_global_step(self, graph):
        with v1.device(devices.HOST):  # in the file of a checkpoint or export that has the variables
            return super()._create_and_assert_global_step(graph)

    def _call_input_fn(self, input_fn, mode, input_context=None):
        training, context = self._training if mode == TRAIN else None, tf.distribute.InputContext()
        if training:
            workers_of_all = training.all_reduce.num_workers
            context = tf.distribute.InputContext(workers_of_all, training.worker, training.num_towers)
        with inputs.arrays_outside_the_graph():
            return super()._call_input_fn(input_fn, mode, context)

    def _get_features_and_labels_from_input_fn(self, input_fn, mode):
        training = self._training
        if mode != TRAIN or not training:
            return super()._get_features_and_labels_from_input_fn(input_fn, mode)
        if training.num_towers == 1:
            features, labels, hooks = super()._get_features_and_labels_from_input_fn(input_fn, mode)
            return features, labels, [*hooks, training]
        dataset = self._call_input_fn(input_fn, mode)
        batches = inputs.Batches(dataset, len(self._placed.towers), training.all_reduce)
        training.batches = batches
        compat.skip_draws(training.worker * _OF_A_WORKER)  # else draws that are not cut are the same in all workers
        return batches, None, [*batches.hooks, training]

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
        training = (self._training if mode == TRAIN else None) or Training(self._placed)
        batches = features if isinstance(features, inputs.Batches) else [(features, labels)]
        places = self._placed.towers[: None if isinstance(features, inputs.Batches) else 1]
        with v1.device(self._device_fn):
            specs, captures = build_towers(call, batches, places, training, self._config.tf_random_seed)
            spec = train_step(specs, captures, training) if mode == TRAIN else specs[0]
        self._has_saver = spec.scaffold.saver is not None
        self._compare_with_checkpoint(self._exported)
        return spec

    def _compare_with_checkpoint(self, path: str | None) -> None:
        """Raises ConfigError if a checkpoint does not fit the model: TensorFlow restores other shapes in silence."""
        if not path or self._has_saver:
            return
        saved = tf.train.load_checkpoint(path)
        shapes, types = saved.get_variable_to_shape_map(), saved.get_variable_to_dtype_map()
        for variable in [] if _OBJECTS in shapes else v1.global_variables():
            name, dtype = variable.op.name, variable.dtype.base_dtype
            fits = name in shapes and types[name] == dtype and variable.shape.is_compatible_with(shapes[name])
            if not fits and "/part_" not in name:  # parts are saved as a whole
                there = f"{types[name].name}{shapes[name]}" if name in shapes else "missing"
                raise errors.ConfigError(
                    f"{path} does not fit the model, whose variable {name} is {dtype.name}{variable.shape.as_list()}; "
                    f"there it is {there}. Train in another model_dir, or with the model that wrote it."
                )

    def _train_with_estimator_spec(self, *args):
        train, training = super()._train_with_estimator_spec, self._training
        member = training.member
        newest = self.latest_checkpoint() if member.task.is_chief else None
        self._compare_with_checkpoint(newest)
        if member.task.is_alone:
            return train(*args)
        done = int(library.estimator._load_global_step_from_checkpoint_dir(self._model_dir)) if newest else 0
        last = done + training.steps if training.steps else training.max_steps
        open_session = functools.partial(workers.open_session, training, self._config, (done, last))
        warm_start = self._warm_start_settings if member.task.is_chief else None
        with (
            compat.replaced(self, "_warm_start_settings", warm_start),
            compat.replaced(self._config, "_cluster_spec", tf.train.ClusterSpec({})),  # a master reports by itself
            compat.replaced(training_module, "MonitoredTrainingSession", open_session),
        ):
            return train(*args)


def on_towers(module: types.ModuleType) -> dict[str, type]:
    """Returns {name: class} of the library's Estimators in a module, as classes whose Estimators train on towers."""
    about = {"__module__": "tower_train.estimator"}
    return {
        name: type(name, (Estimator, cls), about | {"__doc__": cls.__doc__})
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, Estimator.__base__) and cls is not Estimator.__base__
    }


# Where the library makes its own, such as in add_metrics, it makes these.
library.estimator.Estimator, library.run_config.RunConfig = Estimator, RunConfig
