"""model_to_estimator: an Estimator that trains a compiled Keras model."""

import contextlib

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import keras_state
from tower_train.fronts.estimator import captured, saved_model
from tower_train.fronts.estimator.estimator import Estimator
from tower_train.fronts.estimator.run_config import RunConfig
from tower_train.fronts.estimator.spec import EstimatorSpec, ModeKeys

v1 = tf.compat.v1
_LOCAL = [v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES]


def model_to_estimator(keras_model: keras.Model, model_dir=None, config: RunConfig | None = None) -> Estimator:
    """Makes an Estimator that trains a Keras model with the losses, metrics and optimizer it was compiled with.

    It begins with the weights that the model has now; the model keeps them.

    Args:
      keras_model: a model that has its variables and is compiled.
      model_dir, config: as of Estimator.

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
        state = _Mirrored(model.variables, self._initial)
        values = state.values()
        seeds = keras_state.tower_seeds(model.variables, values, captured.tower())
        before = [(v, seeds.get(id(v), value)) for v, value in zip(model.variables, values, strict=True)]
        with keras.StatelessScope(before, collect_losses=True) as scope:
            outputs = model(x, training=training)
        predictions = _by_name(model, outputs)
        if mode == ModeKeys.PREDICT:
            exports = {"serving_default": saved_model.PredictOutput(predictions)}
            return EstimatorSpec(mode, predictions, export_outputs=exports)
        _build_losses_and_metrics(model, x, labels)
        unused = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]  # compute_loss keeps metrics too
        with keras.StatelessScope([*before, *unused], collect_losses=True):
            loss = tf.add_n([model.compute_loss(x, labels, outputs, None, training=training), *scope.losses])
        if not training:
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=_metrics(model, x, labels, outputs))
        weights = state.of(model.trainable_variables)
        now = [(v, scope.get_current_value(v), value) for v, value in before]
        grads, apply = v1.gradients(loss, weights), self._apply(weights)
        with tf.control_dependencies(state.assign([(v, new) for v, new, value in now if new is not value])):
            train_op = captured.record(zip(grads, weights, strict=True), apply)
        return EstimatorSpec(mode, predictions, loss, train_op)

    def _apply(self, weights: list[tf.Variable]):
        """What applies the towers' mean gradients by an optimizer like the model's, with variables of this graph."""
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
    """A creator of variables with plain names: the numbers that Keras' name scopes get here tell of nothing."""

    def create_named(create, **kwargs):
        with v1.name_scope(None):
            return create(**(kwargs | {"name": f"{scope}/{kwargs['name']}"}))

    return create_named


@contextlib.contextmanager
def _standing_in(mine: list[tf.Variable], variables: list[keras.Variable]):
    """Within this block Keras variables are those of the graph."""
    before = [v.value for v in variables]
    try:
        for v, value in zip(variables, mine, strict=True):
            v._initialize(value)
        yield
    finally:
        for v, value in zip(variables, before, strict=True):
            v._initialize(value)


class _Mirrored:
    """For each of some Keras variables one of the default graph, of the same name, that begins with its value."""

    def __init__(self, variables: list[keras.Variable], initial: dict, collections: list[str] | None = None):
        """Args: the Keras variables; {path: value}, 0 where there is none; the graph variables' collections."""
        self._variables = variables
        self.in_graph = []
        for v in variables:
            with tf.device(None):
                self.in_graph.append(
                    v1.get_variable(
                        v.path, v.shape, v.dtype, keras_state.begins_with(initial.get(v.path)), trainable=v.trainable,
                        collections=collections,
                    )
                )  # fmt: skip

    def values(self) -> list[tf.Tensor]:
        return [tf.identity(v) for v in self.in_graph]

    def of(self, variables: list[keras.Variable]) -> list[tf.Variable]:
        """The graph variables of some of the Keras variables."""
        by_id = {id(v): mine for v, mine in zip(self._variables, self.in_graph, strict=True)}
        return [by_id[id(v)] for v in variables]

    def assign(self, pairs: list[tuple[keras.Variable, tf.Tensor]]) -> list[tf.Operation]:
        """Ops that give graph variables new values."""
        mine = self.of([v for v, _ in pairs])
        return [v.assign(new, read_value=False) for v, (_, new) in zip(mine, pairs, strict=True)]


def _arranged(model: keras.Model, features):
    """The features as the model takes them: those of a dict by the names of its inputs."""
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
    """The outputs as a dict."""
    if isinstance(outputs, dict):
        return outputs
    flat = keras.tree.flatten(outputs)
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    else:
        names = getattr(model, "output_names", [f"output_{i + 1}" for i in range(len(flat))])
    return dict(zip(names, flat, strict=True))


def _build_losses_and_metrics(model: keras.Model, x, labels) -> None:
    """Lets Keras make the variables of its losses and metrics; they must not become the graph's."""
    with tf.__internal__.eager_context.eager_mode():
        model._symbolic_build(data_batch=(x, labels, None))


def _metrics(model: keras.Model, x, labels, outputs) -> dict:
    """The compiled metrics as {name: (value, update_op)}, over all batches."""
    state = _Mirrored(model.metrics_variables, {}, _LOCAL)
    with keras.StatelessScope(zip(model.metrics_variables, state.values(), strict=True)) as scope:
        names = model.compute_metrics(x, labels, outputs)
    update = tf.group(state.assign([(v, scope.get_current_value(v)) for v in model.metrics_variables]))
    with keras.StatelessScope(zip(model.metrics_variables, state.values(), strict=True)):
        values = model.get_metrics_result()
    return {name: (tf.convert_to_tensor(values[name]), update) for name in names if name != "loss"}
