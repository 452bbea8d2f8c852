"""model_to_estimator: an Estimator that trains a compiled Keras model."""

import os

import keras
import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.fronts import compat, keras_variables
from tower_train.fronts.lockstep.tower_call import tower_call
from tower_train.fronts.tf_estimator import captured, eval_metrics, library
from tower_train.fronts.tf_estimator.keras_optimizers import KerasOptimizer, copies_of
from tower_train.fronts.tf_estimator.keras_structures import (
    arranged_features,
    arranged_labels,
    by_name,
    without_weights,
)
from tower_train.fronts.tf_estimator.library import EstimatorSpec, ModeKeys
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1
_BY_NAME, _BY_OBJECT = "saver", "checkpoint"


def model_to_estimator(
    keras_model: keras.Model | None = None, keras_model_path=None, custom_objects: dict | None = None, model_dir=None,
    config: RunConfig | None = None, checkpoint_format: str = _BY_NAME, metric_names_map: dict | None = None,
    export_outputs: dict | None = None,
) -> Estimator:  # fmt: skip
    """Makes an Estimator that trains a Keras model with its compiled losses, metrics and optimizer.

    It begins with the model's present weights, and does not change the model. A model without weights gets them with
    the first batch. Features named just "features" and "sample_weights" are the model's inputs and the examples'
    weights.

    Args:
      keras_model: a compiled model.
      keras_model_path: a file of a model saved by Keras, instead.
      custom_objects: {name: class or function} that the file needs.
      model_dir, config: as for Estimator.
      checkpoint_format: "saver"; "checkpoint" is accepted, but checkpoints have variables' names, not objects.
      metric_names_map: {name of a metric in Keras: its name in evaluations}.
      export_outputs: {name of an output: class of its export signature, such as export.RegressionOutput}, in addition
        to a signature of all outputs.

    Raises:
      ConfigError: there is not one model, or it is not compiled, or was made in a tf.Graph.
    """
    if (keras_model is None) == (keras_model_path is None):
        raise errors.ConfigError("model_to_estimator: give either keras_model or keras_model_path.")
    if checkpoint_format not in (_BY_NAME, _BY_OBJECT, None):
        raise errors.ConfigError(f'model_to_estimator: checkpoint_format={checkpoint_format!r}; it must be "saver".')
    if checkpoint_format == _BY_OBJECT:
        console.notice('Checkpoints have variables by names, as with checkpoint_format="saver".')
    model = keras_model if keras_model_path is None else _loaded(os.fspath(keras_model_path), custom_objects)
    if not isinstance(model, keras.Model):
        raise errors.ConfigError(
            f"model_to_estimator: keras_model is a {type(model).__name__}; it must be a Keras model."
        )
    if not model.compiled:
        raise errors.ConfigError("model_to_estimator: the model is not compiled. Call its compile() first.")
    return _KerasEstimator(_KerasModelFn(model, metric_names_map or {}, export_outputs or {}), model_dir, config)


def _loaded(path: str, custom_objects: dict | None) -> keras.Model:
    try:
        return keras.models.load_model(path, custom_objects)
    except (OSError, TypeError, ValueError) as error:
        raise errors.ConfigError(
            f"keras_model_path={path}: Keras cannot load it ({str(error).splitlines()[0]}). Give a file that "
            "model.save() wrote, and custom_objects if it has classes or functions of yours."
        ) from None


class _KerasEstimator(Estimator):
    """Exports the model's initial weights before it is trained."""

    def _export_all_saved_models(
        self, export_dir_base, input_receiver_fn_map, assets_extra=None, as_text=False, checkpoint_path=None, **kwargs
    ):
        path = checkpoint_path or self.latest_checkpoint() or self._save_initial_values()
        return super()._export_all_saved_models(
            export_dir_base, input_receiver_fn_map, assets_extra, as_text, path, **kwargs
        )

    def _save_initial_values(self) -> str:
        """Writes a checkpoint of them, in a folder of model_dir as the library does; returns its path."""
        proto = self._placed and self._session_config
        os.makedirs(folder := os.path.join(self.model_dir, "keras"), exist_ok=True)
        with tf.Graph().as_default(), v1.Session(config=proto) as session:
            v1.train.create_global_step()
            self._model_fn.make_variables()
            session.run(v1.global_variables_initializer())
            return v1.train.Saver().save(session, os.path.join(folder, "keras_model.ckpt"))


class _KerasModelFn:
    """A Keras model as a model_fn: Keras computes with the values of variables of the Estimator's graph."""

    def __init__(self, model: keras.Model, metric_names: dict[str, str], signatures: dict[str, type]):
        self._model, self._metric_names, self._signatures = model, metric_names, signatures
        self._initial = _values(model) if model.built else None
        self._optimizer = KerasOptimizer(copies_of(model.optimizer))

    def __call__(self, features, labels, mode):
        model, training = self._model, mode == ModeKeys.TRAIN
        features, sample_weights = without_weights(features)
        x = arranged_features(model, features)
        if self._initial is None:
            self._initial = _built(model, x)
        mine = self.make_variables()
        values = [tf.identity(mine[id(v)]) for v in model.variables]
        seeds = keras_variables.tower_seeds(model.variables, values, captured.tower())
        before = [(v, seeds.get(id(v), value)) for v, value in zip(model.variables, values, strict=True)]
        outputs, added_losses, assigned = tower_call(model, before, x, training)
        predictions = by_name(model, outputs)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions, export_outputs=self._export_outputs(predictions))
        y = arranged_labels(model, labels, outputs)
        compat.build_losses_and_metrics(model, x, y)
        metrics = {} if training else _in_graph(model.metrics_variables, {}, list(eval_metrics.LOCAL), "metrics/")
        sums = [(v, tf.identity(metrics.get(id(v), tf.zeros(v.shape, v.dtype)))) for v in model.metrics_variables]
        with keras.StatelessScope([*before, *sums], collect_losses=True) as measured:
            loss = model.compute_loss(x, y, outputs, sample_weights, training=training)
            loss = tf.add_n([loss, *(tf.cast(added, loss.dtype) for added in added_losses)])
            names = [] if training else model.compute_metrics(x, y, outputs, sample_weights)
        if not training:
            now = [(metrics[id(v)], measured.get_current_value(v)) for v in model.metrics_variables]
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=self._metrics(now, names))
        weights = [mine[id(v)] for v in model.trainable_variables]
        grads = self._optimizer.gradients(loss, weights, model.trainable_variables)
        with tf.control_dependencies(captured.note((mine[id(v)], value) for v, value in assigned)):
            train_op = self._optimizer.apply_gradients(
                grads, weights, model.trainable_variables, v1.train.get_global_step()
            )
        return EstimatorSpec(mode, predictions, loss, train_op)

    def make_variables(self) -> dict:
        """Makes the graph's variables; returns {id of the Keras variable: the graph's}."""
        if self._initial is None:
            raise errors.ConfigError("The model has no weights before its first batch. Build it, or train first.")
        return _in_graph(self._model.variables, self._initial)

    def _export_outputs(self, predictions: dict) -> dict:
        unknown = ", ".join(map(str, self._signatures.keys() - predictions.keys()))
        if unknown:
            raise errors.ConfigError(
                f"export_outputs names {unknown}; the model's outputs are {', '.join(predictions)}."
            )
        return {library.SERVING: library.export_lib.PredictOutput(predictions)} | {
            name: make(predictions[name]) for name, make in self._signatures.items()
        }

    def _metrics(self, now: list[tuple], names) -> dict:
        """Returns the compiled metrics over all batches, and each output's loss, {name: (value, update_op)}.

        Args:
          now: over the model's metrics variables, the graph's variable and its value after this batch.
          names: of the metrics.
        """
        update = captured.assign(now)
        read = zip(self._model.metrics_variables, [tf.identity(v) for v, _ in now], strict=True)
        with keras.StatelessScope(read):
            values = self._model.get_metrics_result()
        names = [name for name in names if name != "loss"]
        unknown = sorted(set(self._metric_names) - set(names))
        if unknown:
            raise errors.ConfigError(
                f"metric_names_map renames {', '.join(unknown)}; the model's metrics are {', '.join(names) or 'none'}."
            )
        return {self._metric_names.get(name, name): (tf.convert_to_tensor(values[name]), update) for name in names}


def _values(model: keras.Model) -> dict[int, np.ndarray]:
    if not all(hasattr(v.value.handle, "numpy") for v in model.variables):
        raise errors.ConfigError(
            "model_to_estimator: the model was made in a tf.Graph, where weights have no values yet. Make it outside."
        )
    with compat.eager_mode():
        return {id(v): v.numpy() for v in model.variables}


def _built(model: keras.Model, x) -> dict[int, np.ndarray]:
    """Makes the model's variables, outside of the default graph, for inputs like these; returns their values."""
    with compat.eager_mode():
        model(keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype.name), x))
    return _values(model)


def _in_graph(variables: list[keras.Variable], initial: dict, collections: list[str] | None = None, under="") -> dict:
    """Makes a graph variable for each Keras variable, with its name or, if that is taken, a similar one.

    Args:
      variables: the Keras variables.
      initial: {id of the Keras variable: value}; others begin with 0.
      collections: of the graph's variables; None for the usual ones.
      under: begins the names.

    Returns:
      {id of the Keras variable: the graph's}.
    """
    made, names = {}, set()
    for v in variables:
        value, name = initial.get(id(v)), under + v.path
        while name in names:
            name += "_"
        names.add(name)
        initializer = v1.zeros_initializer() if value is None else keras_variables.constant(value)
        with tf.device(None):
            made[id(v)] = v1.get_variable(
                name, v.shape, v.dtype, initializer, trainable=v.trainable, collections=collections
            )
    return made
