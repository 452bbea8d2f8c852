"""model_to_estimator: an Estimator that trains a compiled Keras model."""

import contextlib

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, keras_variables
from tower_train.fronts.tf_estimator import captured, saved_model
from tower_train.fronts.tf_estimator.run_config import RunConfig
from tower_train.fronts.tf_estimator.spec import EstimatorSpec, ModeKeys
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1
_LOCAL = [v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES]


def model_to_estimator(keras_model: keras.Model, model_dir=None, config: RunConfig | None = None) -> Estimator:
    """Makes an Estimator that trains a Keras model with the losses, metrics and optimizer it was compiled with.

    It begins with the weights that the model has now; the model keeps them.

    Args:
      keras_model: a model that has its variables and is compiled.
      model_dir: as for Estimator.
      config: likewise.

    Raises:
      ConfigError: the model is not compiled, has no variables yet, or scales its loss.
    """
    if not keras_model.compiled:
        raise errors.ConfigError("model_to_estimator: the model is not compiled. Call its compile() first.")
    if not keras_model.built:
        raise errors.ConfigError(
            "model_to_estimator: the model has no variables yet. Call it on a batch, or build() it."
        )
    if isinstance(keras_model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise errors.ConfigError(
            "model_to_estimator: the model scales its loss (mixed_float16). Use multi_gpu_model, or float32."
        )
    return Estimator(_KerasModelFn(keras_model), model_dir, config)


class _KerasModelFn:
    """A Keras model as a model_fn: Keras computes with the values of variables of the Estimator's graph."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._optimizer = keras.optimizers.serialize(model.optimizer)
        self._initial = {v.path: v.numpy() for v in model.variables}

    def __call__(self, features, labels, mode):
        model, training = self._model, mode == ModeKeys.TRAIN
        x = _arranged(model, features)
        mine = _in_graph(model.variables, self._initial)
        values = [tf.identity(mine[id(v)]) for v in model.variables]
        seeds = keras_variables.tower_seeds(model.variables, values, captured.tower())
        before = [(v, seeds.get(id(v), value)) for v, value in zip(model.variables, values, strict=True)]
        with keras.StatelessScope(before, collect_losses=True) as scope:
            outputs = model(x, training=training)
        predictions = _by_name(model, outputs)
        if mode == ModeKeys.PREDICT:
            exports = {"serving_default": saved_model.PredictOutput(predictions)}
            return EstimatorSpec(mode, predictions, export_outputs=exports)
        compat.build_losses_and_metrics(model, x, labels)
        unused = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]  # compute_loss keeps metrics too
        with keras.StatelessScope([*before, *unused], collect_losses=True):
            loss = tf.add_n([model.compute_loss(x, labels, outputs, None, training=training), *scope.losses])
        if not training:
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=_metrics(model, x, labels, outputs))
        weights = [mine[id(v)] for v in model.trainable_variables]
        grads, apply = v1.gradients(loss, weights), self._apply(weights)
        now = [(mine[id(v)], scope.get_current_value(v), value) for v, value in before]
        with tf.control_dependencies([v.assign(new, read_value=False) for v, new, value in now if new is not value]):
            train_op = captured.record(zip(grads, weights, strict=True), apply)
        return EstimatorSpec(mode, predictions, loss, train_op)

    def _apply(self, weights: list[tf.Variable]):
        """Returns the function that applies the towers' mean gradients, by an optimizer like the model's."""
        if captured.tower():
            return None  # the first tower's is called for all
        variables, global_step = self._model.trainable_variables, v1.train.get_global_step()
        optimizer = keras.optimizers.deserialize(self._optimizer)
        with _standing_in(weights, variables), tf.variable_creator_scope(_named_under(optimizer.name)):
            optimizer.build(variables)

        def apply(mean_grads):
            names = {w.ref(): v for w, v in zip(weights, variables, strict=True)}
            trained = [names[w.ref()] for _, w in mean_grads]

            def update(*grads):
                with _standing_in(weights, variables):
                    optimizer.apply(grads, trained)
                return global_step.assign_add(1)

            # Within a function TensorFlow keeps the order of Keras' assignments.
            return tf.function(update, autograph=False)(*[tf.convert_to_tensor(grad) for grad, _ in mean_grads])

        return apply


def _named_under(scope: str):
    """Returns a variable creator with plain names: Keras' name scopes get meaningless numbers here."""

    def create_named(create, **kwargs):
        with v1.name_scope(None):
            return create(**(kwargs | {"name": f"{scope}/{kwargs['name']}"}))

    return create_named


@contextlib.contextmanager
def _standing_in(mine: list[tf.Variable], variables: list[keras.Variable]):
    """Within this block the storage of Keras variables is the graph's variables."""
    before = [v.value for v in variables]
    try:
        for v, value in zip(variables, mine, strict=True):
            compat.set_storage(v, value)
        yield
    finally:
        for v, value in zip(variables, before, strict=True):
            compat.set_storage(v, value)


def _in_graph(variables: list[keras.Variable], initial: dict, collections: list[str] | None = None) -> dict:
    """Makes a variable of the default graph for each Keras variable, with its name.

    Args:
      variables: the Keras variables.
      initial: {path: value}; others begin with 0.
      collections: of the graph's variables; None for the usual ones.

    Returns:
      {id of the Keras variable: the graph's}.
    """
    made = {}
    for v in variables:
        value = initial.get(v.path)
        initializer = v1.zeros_initializer() if value is None else keras_variables.constant(value)
        with tf.device(None):
            made[id(v)] = v1.get_variable(
                v.path, v.shape, v.dtype, initializer, trainable=v.trainable, collections=collections
            )
    return made


def _arranged(model: keras.Model, features):
    """Returns the features as the model takes them: those of a dict by the names of its inputs."""
    wanted = getattr(model, "input", None)
    if not isinstance(features, dict) or wanted is None or isinstance(wanted, dict):
        return features
    missing = [tensor.name for tensor in keras.tree.flatten(wanted) if tensor.name not in features]
    if missing:
        raise errors.GraphError(
            f"input_fn gives the features {', '.join(features)}; the model's inputs {', '.join(missing)} are missing. "
            "Name features as the model's Input layers."
        )
    return keras.tree.map_structure(lambda tensor: features[tensor.name], wanted)


def _by_name(model: keras.Model, outputs) -> dict:
    """Returns the outputs as a dict."""
    if isinstance(outputs, dict):
        return outputs
    flat = keras.tree.flatten(outputs)
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    else:
        names = getattr(model, "output_names", [f"output_{i + 1}" for i in range(len(flat))])
    return dict(zip(names, flat, strict=True))


def _metrics(model: keras.Model, x, labels, outputs) -> dict:
    """Returns the compiled metrics over all batches, {name: (value, update_op)}."""
    variables = model.metrics_variables
    mine = list(_in_graph(variables, {}, _LOCAL).values())

    def read():
        return zip(variables, [tf.identity(v) for v in mine], strict=True)

    with keras.StatelessScope(read()) as scope:
        names = model.compute_metrics(x, labels, outputs)
    now = [scope.get_current_value(v) for v in variables]
    update = tf.group([v.assign(new, read_value=False) for v, new in zip(mine, now, strict=True)])
    with keras.StatelessScope(read()):
        values = model.get_metrics_result()
    return {name: (tf.convert_to_tensor(values[name]), update) for name in names if name != "loss"}
