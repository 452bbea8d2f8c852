"""keras_network: a Keras model as a workload's network, with Keras' layers and the towers' variables.

The model is built once, for its layers only: it holds no values. In each tower it computes with variables of
get_variable, named as its own ("block1_conv1/kernel"), so that every rule of the towers holds for it.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors, layers
from tower_train.fronts import compat, keras_building
from tower_train.graph import context
from tower_train.normalization import moving_collections, normalize, note

v1 = tf.compat.v1


def keras_network(
    build: Callable[[], keras.Model], param_group: Callable[[str], Mapping[str, Any] | None] = lambda name: None
):
    """Makes the `inference` of a workload from a function that builds a Keras model.

    A workload's rules hold: no layer gets a value of its own that depends on the tower. Batch normalisation is
    tower_train.layers.batch_normalization; values that other layers assign to their variables in training are averaged
    over towers once per step. Dropout and other layers draw by example, as tower_train.layers.dropout does, and numbers
    of no example once for all towers; the check of towers refuses the few other draws. Training begins with weights
    that `build` loads; other initial values depend on the run's seed and the variables' names. Layers with
    `trainable = False` are not trained.

    Args:
      build: returns a model that has its variables and whose outputs are logits (without a softmax, for the usual
        loss). It is called once for each dtype, in a thread of its own, in which Keras has the run's dtype and names
        layers afresh.
      param_group: the name of a variable -> arguments of tower_train.layers.param_group for it, or None.

    Returns:
      inference: (features, training) -> outputs. The arithmetic is in the dtype of the features, the run's if none
        of them is floating point. It raises ConfigError if `build` returned no such model, and GraphError if a layer
        does what towers cannot.
    """

    if isinstance(build, keras.Model):
        raise errors.ConfigError("keras_network got a model. Give it the function that builds one, without calling it.")

    @functools.cache
    def network(dtype: str) -> _Network:
        return keras_building.build_isolated(lambda assigned: _Network(build(), dtype, assigned, param_group), dtype)

    def inference(features, training: bool):
        dtypes = [tensor.dtype for tensor in tf.nest.flatten(features) if tensor.dtype.is_floating]
        return network((dtypes or [context.current().dtype])[0].name)(features, training)

    inference.build = build  # for fronts/keras_files.py
    return inference


class _Network:
    """A built model and its initial values; called, it is one tower's network."""

    def __init__(self, model: keras.Model, dtype: str, assigned: keras.StatelessScope, param_group: Callable):
        if not isinstance(model, keras.Model) or not model.built:
            raise errors.ConfigError(
                f"keras_network: build() returned {getattr(model, 'name', model)}, which has no variables. Let it "
                "return a keras.Model made from a keras.Input, or call the model's build()."
            )
        self._model, self._dtype, self._param_group = model, dtype, param_group
        self._variables = keras_building.named_variables(model)
        self._generators = {id(v): name.rpartition("/")[0] for name, v in self._variables.items()}
        self._initializers = {
            name: keras_building.as_initializer(v, assigned.get_current_value(v)) for name, v in self._variables.items()
        }
        self._moving: set[int] = set()  # ids of variables that follow the batch statistics
        self._in_graph: dict[int, tf.Variable] = {}  # by id of the model's: of the tower being built
        self._made = weakref.WeakKeyDictionary()  # {graph in which it has been called: {function: what it made there}}
        self._replaced: list[tuple[keras.Layer, str, Callable[[], Any]]] = []  # (layer, attribute, what makes another)
        compat.take_constants(model)
        for layer in compat.sublayers(model):
            self._adapt(layer)

    def __call__(self, features, training: bool):
        self._in_graph = self._graph_variables()
        if fault := keras_building.features_fault(self._model, features):
            raise errors.GraphError(f"keras_network: {fault}")
        values = [(v, tf.convert_to_tensor(self._in_graph[id(v)])) for v in self._variables.values()]
        moments = compat.moments_of_graph(lambda v: self._in_graph[id(v)])  # they may be a checkpoint's
        with keras_building.floatx(self._dtype), compat.drawn_by(self._draw), moments, contextlib.ExitStack() as stack:
            for layer, name, make in self._replaced:  # the model may be the user's
                stack.enter_context(compat.replaced(layer, name, make()))
            scope = stack.enter_context(keras_building.TowerScope(values))
            outputs = self._model(features, training=training)
        if scope.losses:
            raise errors.GraphError(
                f"keras_network: {self._model.name} has layers that add to the loss (add_loss or an activity "
                "regularizer). Put that into the workload's loss."
            )
        for v, value in scope.assigned.values() if training else ():  # the variable gets the towers' mean
            note(context.Statistic(self._in_graph[id(v)], value, momentum=0.0, is_averaged=False))
        return outputs

    def _draw(self, function: Callable, given: dict[str, Any]):
        """Draws what a function of keras.random draws with these arguments, by example."""
        kind, seed, shape, draws = function.__name__, given["seed"], given.get("shape"), context.current().draws
        if kind == "dropout" and 0 < given["rate"] < 1:
            sizes = tf.shape(given["inputs"])
            shape = given["noise_shape"] or [None] * given["inputs"].shape.rank
            shape = [sizes[i] if size is None else size for i, size in enumerate(shape)]
        is_known = kind in ("uniform", "normal", "randint") or kind == "dropout" and shape is not None
        by_example = draws.has_row_each(shape) if is_known and draws and not isinstance(seed, int) else None
        layer = self._generators.get(id(getattr(seed, "state", None)), "keras")
        if by_example is None:  # of rows that are no examples, or the same each time
            if isinstance(seed, keras.random.SeedGenerator) and layer == "keras":
                raise errors.GraphError(
                    f"keras_network: {self._model.name} draws by keras.random.{kind} from a SeedGenerator that belongs "
                    "to none of its layers. Make it an attribute of the layer."
                )
            return function(**given)
        if kind == "dropout":
            return draws.dropout(layer, given["inputs"], given["rate"], given["noise_shape"], by_example)
        dtype = given["dtype"] or keras.config.floatx()
        if kind == "normal":
            return given["mean"] + given["stddev"] * draws.for_layer(layer, shape, dtype, by_example, normal=True)
        numbers = draws.for_layer(layer, shape, tf.float64 if kind == "randint" else dtype, by_example)
        low, high = (tf.cast(given[limit], numbers.dtype) for limit in ("minval", "maxval"))
        numbers = (high - low) * numbers
        return low + numbers if kind == "uniform" else tf.cast(low + tf.floor(numbers), dtype)

    def _graph_variables(self) -> dict[int, tf.Variable]:
        """Returns the graph's variables: the first tower creates them; further calls share them."""
        trained, graph = not context.current().frozen, v1.get_default_graph()
        reuse = v1.AUTO_REUSE if graph in self._made else None
        self._made.setdefault(graph, {})

        def get(name: str, v: keras.Variable) -> tf.Variable:
            group = self._param_group(name)
            with layers.param_group(**group) if group else contextlib.nullcontext():
                return v1.get_variable(
                    name,
                    v.shape,
                    v.dtype,
                    self._initializers[name],
                    v.regularizer if v.trainable else None,
                    trainable=v.trainable,
                    constraint=v.constraint,
                    collections=None if v.trainable else moving_collections(trained and id(v) in self._moving),
                )

        with v1.variable_scope(v1.get_variable_scope(), reuse=reuse):
            return {id(v): get(name, v) for name, v in self._variables.items()}

    def _adapt(self, layer: keras.Layer) -> None:
        """Makes a layer fit for towers: the towers' batch normalisation, and tables and constants of the graph."""
        if isinstance(layer, keras.layers.Normalization):
            return
        for name, make in compat.eager_attributes(layer).items():
            self._replaced.append((layer, name, functools.partial(self._made_in_graph, make)))
        if isinstance(layer, keras.layers.TextVectorization):
            self._replaced.append((layer, "call", lambda: functools.partial(_with_rows, layer.call)))
        if type(layer) is not keras.layers.BatchNormalization:  # others have rules of their own
            return
        if layer.axis in (-1, layer.input_spec.ndim - 1) and not getattr(layer, "renorm", False):
            self._moving |= {id(layer.moving_mean), id(layer.moving_variance)} if layer.trainable else set()
            self._replaced.append((layer, "call", lambda: functools.partial(self._normalize, layer)))
        elif layer.synchronized:  # over all towers as others are, and by no strategy
            self._replaced.append((layer, "synchronized", lambda: False))

    def _made_in_graph(self, make: Callable):
        """Returns what a function makes in a graph, the same for all towers."""
        with tf.init_scope(), tf.device("/cpu:0"):  # of the graph around a loop's or a branch's
            made = self._made.setdefault(v1.get_default_graph(), {})
            if make not in made:
                made[make] = make()
        return made[make]

    def _normalize(self, layer: keras.layers.BatchNormalization, inputs, training=None, mask=None):
        """Replaces the layer's `call`, by the towers' rules."""
        if mask is not None:
            raise errors.GraphError(f"keras_network: {layer.name} gets a mask, which towers cannot normalise by.")
        tower = context.current()
        moving = [self._in_graph[id(v)] for v in (layer.moving_mean, layer.moving_variance)]
        gamma = self._in_graph[id(layer.gamma)] if layer.scale else tf.ones(moving[0].shape, moving[0].dtype)
        beta = self._in_graph[id(layer.beta)] if layer.center else tf.zeros(moving[0].shape, moving[0].dtype)
        training = bool(training) and layer.trainable and not tower.frozen
        return normalize(inputs, training, gamma, beta, moving, layer.momentum, layer.epsilon)


def _with_rows(call: Callable, inputs: tf.Tensor):
    """Returns a layer's outputs with as many rows as its inputs, which TensorFlow forgets of a ragged tensor, and draws
    by example need."""
    outputs = call(inputs)
    return tf.ensure_shape(outputs, [inputs.shape[0], *outputs.shape[1:]]) if tf.is_tensor(outputs) else outputs
