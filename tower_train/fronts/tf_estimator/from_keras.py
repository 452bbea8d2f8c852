"""model_to_estimator: an Estimator that trains a compiled Keras model; Keras optimizers in Estimators' graphs."""

import copy
import re
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, keras_building, meeting
from tower_train.fronts.tf_estimator import library, towers
from tower_train.fronts.tf_estimator.tower_estimator import Estimator

v1 = tf.compat.v1
_LOCAL = (v1.GraphKeys.LOCAL_VARIABLES, v1.GraphKeys.METRIC_VARIABLES)
_GLOBAL = (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.TRAINABLE_VARIABLES)
_for_keras_2 = library.keras_lib.model_to_estimator
_get_optimizer = library.optimizers.get_optimizer_instance
_validate_metrics = library.model_fn._validate_eval_metric_ops


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path=None,
    custom_objects: dict | None = None,
    model_dir=None,
    config: library.run_config.RunConfig | None = None,
    checkpoint_format: str = "saver",
    **only_keras_2,
) -> Estimator:
    """Makes an Estimator that trains a Keras model with its compiled losses, metrics and optimizer.

    It begins with the model's present weights, and does not change the model. A model without weights gets them with
    the first batch. Features named just "features" and "sample_weights" are the model's inputs and the examples'
    weights. A model of Keras 2 (tf_keras) is the library's: its optimizer is one of tf_keras.optimizers.legacy.

    keras_model_path is a file of a model saved by Keras, whose classes and functions custom_objects names. Checkpoints
    of models of Keras 3 have variables' names, whatever checkpoint_format. metric_names_map and export_outputs are for
    Keras 2.

    Raises:
      ConfigError: the model of Keras 3 is not compiled, or there are arguments for Keras 2.
    """
    model, path = keras_model, keras_model_path
    if model is None and path is not None:
        model, path = keras.models.load_model(path, custom_objects), None
    if path is not None or not isinstance(model, keras.Model):  # the library refuses a model and a path
        return _for_keras_2(model, path, custom_objects, model_dir, config, checkpoint_format, **only_keras_2)
    if only_keras_2:
        raise errors.ConfigError(f"model_to_estimator: {', '.join(only_keras_2)} is for models of Keras 2 only.")
    if not model.compiled:
        raise errors.ConfigError("model_to_estimator: the model is not compiled. Call its compile() first.")
    return Estimator(_KerasModelFn(model), model_dir, config)


class _KerasModelFn:
    """A Keras model as a model_fn: Keras computes with the values of variables of the Estimator's graph."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._initial = _values(model) if model.built else None
        self._optimizer = KerasOptimizer(copier(model.optimizer))

    def __call__(self, features, labels, mode):
        model, is_training = self._model, mode == library.api.ModeKeys.TRAIN
        is_weighted = isinstance(features, dict) and features.keys() == {"features", "sample_weights"}
        x, weights = (features["features"], features["sample_weights"]) if is_weighted else (features, None)
        if isinstance(x, dict) and len(x) == 1 and isinstance(model, keras.Sequential):
            [x] = x.values()  # its input has no name that a user would know
        if self._initial is None:
            with compat.eager_mode():  # its variables, for inputs like these
                model(keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype.name), x))
            self._initial = _values(model)
        graphs = _in_graph(model.variables, self._initial)
        before = [(v, tf.identity(graphs[id(v)])) for v in model.variables]
        with keras_building.TowerScope(before) as scope, compat.moments_of_graph(lambda v: graphs[id(v)]):
            outputs = model(x, training=is_training)
        predictions = (
            outputs
            if isinstance(outputs, dict)
            else dict(zip(keras_building.output_names(model, outputs), keras.tree.flatten(outputs), strict=True))
        )
        if mode == library.api.ModeKeys.PREDICT:
            return library.api.EstimatorSpec(mode, predictions)
        compat.build_losses_and_metrics(model, x, labels)
        sums = {} if is_training else _in_graph(model.metrics_variables, {}, list(_LOCAL), "metrics/")
        zeros = {id(v): tf.zeros(v.shape, v.dtype) for v in model.metrics_variables}
        sums_before = [(v, tf.identity((sums or zeros)[id(v)])) for v in model.metrics_variables]
        with keras.StatelessScope([*before, *sums_before], collect_losses=True) as measured:
            loss = model.compute_loss(x, labels, outputs, weights, training=is_training)
            loss = tf.add_n([loss, *(tf.cast(tf.reduce_sum(added), loss.dtype) for added in scope.losses)])
            if not is_training:
                model.compute_metrics(x, labels, outputs, weights)
        if not is_training:
            update = towers.assign((sums[id(v)], measured.get_current_value(v)) for v in model.metrics_variables)
            return library.api.EstimatorSpec(mode, predictions, loss, eval_metric_ops=_metrics(model, sums, update))
        meeting.current().assigned.extend((graphs[id(v)], value) for v, value in scope.assigned.values())
        trained = [graphs[id(v)] for v in model.trainable_variables]
        train_op = self._optimizer.minimize(loss, v1.train.get_global_step(), trained)
        return library.api.EstimatorSpec(mode, predictions, loss, train_op)


def _metrics(model: keras.Model, sums: dict, update: tf.Operation) -> dict:
    """Returns the compiled metrics over all batches, and each output's loss, {name: (value, update_op)}."""
    with keras.StatelessScope([(v, tf.identity(sums[id(v)])) for v in model.metrics_variables]):
        values = model.get_metrics_result()
    return {name: (tf.convert_to_tensor(value), update) for name, value in values.items() if name != "loss"}


def _values(model: keras.Model) -> dict[int, np.ndarray]:
    with compat.eager_mode():
        return {id(v): v.numpy() for v in model.variables}


def _in_graph(variables: list[keras.Variable], initial: dict, collections: list[str] | None = None, under="") -> dict:
    """Makes a graph variable for each Keras variable, with its name or, if that is taken, a similar one.

    initial: {id of the Keras variable: value}; others begin with 0. Returns {id of the Keras variable: the graph's}.
    """
    made, names = {}, set()
    for v in variables:
        value, name = initial.get(id(v)), under + v.path
        while name in names:
            name += "_"
        names.add(name)
        initializer = v1.zeros_initializer() if value is None else keras_building.constant(value)
        made[id(v)] = v1.get_variable(
            name, v.shape, v.dtype, initializer, trainable=v.trainable, collections=collections
        )
    return made


def copier(optimizer: keras.optimizers.Optimizer) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that makes optimizers like this one, which stays as it is, in the default graph."""
    with compat.eager_mode():
        config = optimizer.get_config()
    return lambda: type(optimizer).from_config(copy.deepcopy(config))  # it takes parts out


class KerasOptimizer:
    """A Keras optimizer with the interface of tf.compat.v1.train's, for use in a model_fn.

    `make` returns the Keras optimizer, of the default graph; it is called once per tower.
    """

    def __init__(self, make: Callable[[], keras.optimizers.Optimizer]):
        self._make = make

    def minimize(self, loss: tf.Tensor, global_step=None, var_list: list[tf.Variable] | None = None) -> tf.Operation:
        weights = var_list or v1.trainable_variables()
        variables = {weight.ref(): _stored_in(weight) for weight in weights}
        # Initial values wait for nothing.
        with tf.control_dependencies(None), tf.variable_creator_scope(_plainly_named):
            optimizer = self._make()
            optimizer.build(list(variables.values()))
        grads = v1.gradients(optimizer.scale_loss(loss), weights)

        def apply(mean_grads):
            trained = [variables[weight.ref()] for _, weight in mean_grads]

            # All gradients first: what needs none, such as counters, would count a step whose input has ended.
            there = [tensor.op for tensor in tf.nest.flatten([grad for grad, _ in mean_grads], expand_composites=True)]
            with tf.control_dependencies(there), compat.in_program_order() as done:  # Keras' assignments
                optimizer.apply([grad for grad, _ in mean_grads], trained)
                counted = tf.constant(0) if global_step is None else global_step.assign_add(1)
                return done(tf.convert_to_tensor(counted))

        training = meeting.current().towers.owner
        return training.update(optimizer, zip(grads, weights, strict=True), apply)


def _stored_in(weight: tf.Variable) -> keras.Variable:
    """Returns a Keras variable stored in this variable of the graph."""
    with tf.variable_creator_scope(lambda create, **kwargs: weight):
        return keras.Variable("zeros", weight.shape, weight.dtype.name, name=weight.op.name.replace("/", "_"))


def _plainly_named(create, **kwargs):
    """Creates a variable of an optimizer, without the numbers that Keras gives to optimizers and scopes."""
    scope = re.sub(r"(_\d+)+$", "", v1.get_default_graph().get_name_scope().rpartition("/")[2])
    with v1.name_scope(None):
        return create(**(kwargs | {"name": f"{scope}/{kwargs['name']}"}))


def _optimizer_of_canned(optimizer, learning_rate=None):
    """Stands for the library's function that makes a canned Estimator's optimizer, which may be one of Keras 3."""
    made = optimizer() if callable(optimizer) else optimizer
    if isinstance(made, keras.optimizers.Optimizer):
        return KerasOptimizer((lambda: made) if callable(optimizer) else copier(made))
    return _get_optimizer(optimizer, learning_rate)


def _validated(metrics):
    """Stands for the library's check of an EstimatorSpec's metrics, which may be of Keras 3 and updated by model_fn."""
    if isinstance(metrics, dict) and meeting.current():
        metrics = {k: _metric_pair(k, v) if isinstance(v, keras.Metric) else v for k, v in metrics.items()}
    return _validate_metrics(metrics)


def _metric_pair(name: str, metric: keras.Metric) -> tuple:
    """Returns (value, update_op). The metric's variables are reset for each evaluation, and in no checkpoint.

    Raises:
      GraphError: it is not updated, or more than once.
    """
    variables = {id(v.value): v.value for v in metric.variables}
    assigned = [(variable, value) for variable, value in meeting.current().assigned if id(variable) in variables]
    if not assigned or len(assigned) != len({id(variable) for variable, _ in assigned}):
        raise errors.GraphError(
            f"eval_metric_ops[{name!r}]: call update_state once in a model_fn, where each call begins at the same "
            "values. Join the tensors, or use several metrics."
        )
    for key in _GLOBAL:
        collection = v1.get_collection_ref(key)
        collection[:] = [variable for variable in collection if id(variable) not in variables]
    for key in _LOCAL:
        v1.get_collection_ref(key).extend(variables.values())
    return metric.result(), towers.assign(assigned)


library.optimizers.get_optimizer_instance = _optimizer_of_canned
library.model_fn._validate_eval_metric_ops = _validated
