"""keras_network: a Keras model as a workload's network, with Keras' layers and the towers' variables.

The model is built once, for its layers only: it holds no values. In each tower it computes with variables of
get_variable, named as its own ("block1_conv1/kernel"), so that every rule of the towers holds for it.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, keras_variables
from tower_train.fronts.keras_building import build_isolated, floatx, freeze, kept_in, named_variables
from tower_train.fronts.lockstep.tower_call import tower_call
from tower_train.graph import context
from tower_train.graph.draws import Draws
from tower_train.normalization import moving_collections, normalize, note

v1 = tf.compat.v1


def keras_network(build: Callable[[], keras.Model], freeze_until: str | None = None):
    """Makes the `inference` of a workload from a function that builds a Keras model.

    A workload's rules hold: no layer gets a value of its own that depends on the tower. Batch normalisation is
    tower_train.layers.batch_normalization; values that other layers assign to their variables in training are averaged
    over towers once per step. Dropout and other layers draw by example, as tower_train.layers.dropout does, and numbers
    of no example once for all towers; the check of towers refuses the few other draws. Training begins with weights
    that `build` loads; other initial values depend on the run's seed and the variables' names.

    Args:
      build: returns a model that has its variables and whose outputs are logits (without a softmax, for the usual
        loss). It is called once for each dtype, in a thread of its own, in which Keras has the run's dtype and names
        layers afresh.
      freeze_until: the name of one of the model's layers: it and those before it in `model.layers` are not trained, nor
        are layers with `trainable = False`.

    Returns:
      inference: (features, training) -> outputs. The arithmetic is in the dtype of the features, the run's if none
        of them is floating point. It raises ConfigError if freeze_until names no layer or `build` returned no such
        model, and GraphError if a layer does what towers cannot.
    """

    @functools.cache
    def network(dtype: str) -> _Network:
        return build_isolated(lambda assigned: _network(build(), freeze_until, dtype, assigned), dtype)

    def inference(features, training: bool):
        dtypes = [tensor.dtype for tensor in tf.nest.flatten(features) if tensor.dtype.is_floating]
        return network((dtypes or [context.current().dtype])[0].name)(features, training)

    inference.build = build  # for fronts/keras_files.py
    return inference


def _network(model: keras.Model, freeze_until: str | None, dtype: str, assigned: keras.StatelessScope) -> "_Network":
    if not isinstance(model, keras.Model) or not model.built:
        found = f"{model.name}, which has no variables yet" if isinstance(model, keras.Model) else repr(model)
        raise errors.ConfigError(
            f"keras_network: build() returned {found}. Let it return a keras.Model made from a keras.Input, or call "
            "the model's build()."
        )
    expected = kept_in(dtype)
    for v in model.variables:
        if tf.as_dtype(v.dtype).is_floating and v.dtype != expected:
            raise errors.ConfigError(
                f"keras_network: the variable {v.path} is {v.dtype}, and the run's are {expected}. Make the layers "
                "within build(), without a dtype of their own, or choose another --dtype."
            )
    if freeze_until:
        freeze(model, freeze_until)
    return _Network(model, dtype, assigned)


class _Network:
    """A built model and its initial values; called, it is one tower's network."""

    def __init__(self, model: keras.Model, dtype: str, assigned: keras.StatelessScope):
        self._model, self._dtype = model, dtype
        named = named_variables(model)
        self._names, self._variables = list(named), list(named.values())
        self._generators = {id(v): n.rpartition("/")[0] for v, n in zip(self._variables, self._names, strict=True)}
        self._initializers = [keras_variables.initializer_of(v, assigned.get_current_value(v)) for v in self._variables]
        self._moving: set[int] = set()  # ids of variables that follow the batch statistics
        self._in_graph: dict[int, tf.Variable] = {}  # by id of the model's: of the tower being built
        self._made = weakref.WeakKeyDictionary()  # {graph: {function: what it made there}}
        self._graphs = weakref.WeakSet()  # in which it has been called
        self._normalizing: list[keras.layers.BatchNormalization] = []  # by the towers' rules
        self._eager: list[tuple[keras.Layer, str, Any]] = []  # (layer, attribute, what makes it in a graph)
        self._of_text: list[keras.layers.TextVectorization] = []
        self._normalizing_alone: list[keras.Layer] = []  # by rules of their own
        compat.take_constants(model)
        for layer in compat.sublayers(model):
            self._adapt(layer)

    def __call__(self, features, training: bool):
        if self._normalizing_alone and context.current().synchronized_towers:
            raise errors.ConfigError(
                f"--sync_batch_norm: {self._normalizing_alone[0].name} of {self._model.name} is a batch normalisation "
                "that is not keras.layers.BatchNormalization over the last axis. Leave the option out."
            )
        self._in_graph = {id(v): mine for v, mine in zip(self._variables, self._graph_variables(), strict=True)}
        values = [(v, tf.convert_to_tensor(self._in_graph[id(v)])) for v in self._variables]
        with floatx(self._dtype), self._layers_in_towers(), compat.drawn_otherwise(self._draws):
            try:
                called = tower_call(self._model, values, features, training)
            except (TypeError, ValueError) as error:
                self._check_input(features)
                if isinstance(error, TypeError) and self._dtype != "float32" and "does not match type" in str(error):
                    calling = str(error).partition("calling ")[2].partition(".call()")[0] or self._model.name
                    raise errors.ConfigError(
                        f"keras_network: {calling} mixes {self._dtype} with other types. Train with --dtype=float32."
                    ) from error
                raise error
        if training:
            if called.losses:
                raise errors.GraphError(
                    f"keras_network: {self._model.name} has layers that add to the loss (add_loss or an activity "
                    "regularizer). Put that into the workload's loss."
                )
            for v, value in called.assigned:  # the variable gets the towers' mean
                moving = self._in_graph[id(v)]
                note(context.Statistic(moving, value, momentum=0.0, is_averaged=False))
        return called.outputs

    def _check_input(self, features) -> None:
        """Raises GraphError if the model was made for features of other shapes or names."""
        wanted = {each.name: tuple(each.shape[1:]) for each in self._model.inputs or ()}
        names = sorted(features) if isinstance(features, dict) else wanted
        there = dict(zip(names, (tuple(each.shape[1:]) for each in tf.nest.flatten(features)), strict=False))
        if all(name in there and tf.TensorShape(wanted[name]).is_compatible_with(there[name]) for name in wanted):
            return
        texts = [
            ", ".join(f"{name} {shape}" if isinstance(features, dict) else str(shape) for name, shape in each.items())
            for each in (wanted, there)
        ]
        raise errors.GraphError(
            f"keras_network: {self._model.name} is made for features of shape {texts[0]}, and the data's are "
            f"{texts[1]}. Give keras.Input that shape and name, or let `prepare` make it."
        )

    def _draws(self, seed, shape) -> "_Draws | None":
        """Returns the numbers of a draw; None if they are of no example, or the same each time."""
        draws = context.current().draws
        if draws is None or isinstance(seed, int):
            return None
        each = draws.rows_each(shape)
        name = self._generators.get(id(compat.seed_state(seed)), "keras")
        return None if each == 0 else _Draws(draws, name, each)

    def _graph_variables(self) -> list[tf.Variable]:
        """Returns the graph's variables: the first tower creates them; further calls share them."""
        trained, graph = not context.current().frozen, v1.get_default_graph()
        with v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE if graph in self._graphs else None):
            self._graphs.add(graph)
            return [
                v1.get_variable(
                    name, v.shape, v.dtype, initializer, v.regularizer if v.trainable else None, trainable=v.trainable,
                    collections=None if v.trainable else moving_collections(trained and id(v) in self._moving),
                    constraint=v.constraint,
                )
                for v, name, initializer in zip(self._variables, self._names, self._initializers, strict=True)
            ]  # fmt: skip

    def _adapt(self, layer: keras.Layer) -> None:
        """Makes a layer fit for towers."""
        self._eager += [(layer, name, make) for name, make in compat.eager_attributes(layer).items()]
        if isinstance(layer, keras.layers.TextVectorization):
            self._of_text.append(layer)
        if not isinstance(layer, keras.layers.BatchNormalization):
            return
        last = layer.axis in (-1, layer.input_spec.ndim - 1)
        if type(layer) is not keras.layers.BatchNormalization or not last or compat.renormalizes(layer):
            self._normalizing_alone += [layer] if layer.trainable else []
            return
        if layer.trainable:
            self._moving |= {id(layer.moving_mean), id(layer.moving_variance)}
        self._normalizing.append(layer)

    @contextlib.contextmanager
    def _layers_in_towers(self) -> Iterator[None]:
        """Gives the model, which may be the user's, the towers' batch normalisation, and tables and constants of the
        graph, within this block."""
        with contextlib.ExitStack() as stack:
            for layer, name, make in self._eager:
                stack.enter_context(compat.replaced(layer, name, self._of_graph(make)))
            for layer in self._of_text:
                stack.enter_context(compat.replaced(layer, "call", functools.partial(_with_rows, layer.call)))
            for layer in self._normalizing:
                stack.enter_context(compat.replaced(layer, "call", functools.partial(self._normalize, layer)))
            yield

    def _of_graph(self, make: Callable):
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
        mean, variance = (self._in_graph[id(v)] for v in (layer.moving_mean, layer.moving_variance))
        gamma = self._in_graph[id(layer.gamma)] if layer.scale else tf.ones(mean.shape, mean.dtype)
        beta = self._in_graph[id(layer.beta)] if layer.center else tf.zeros(mean.shape, mean.dtype)
        training = bool(training) and layer.trainable and not context.current().frozen
        return normalize(inputs, training, gamma, beta, mean, variance, layer.momentum, layer.epsilon)


def _with_rows(call: Callable, inputs: tf.Tensor):
    """Returns a layer's outputs with as many rows as its inputs, which TensorFlow forgets of a ragged tensor, and draws
    by example need."""
    outputs = call(inputs)
    return tf.ensure_shape(outputs, [inputs.shape[0], *outputs.shape[1:]]) if tf.is_tensor(outputs) else outputs


@dataclasses.dataclass(frozen=True)
class _Draws:
    """The numbers that a seed generator of Keras gets in a tower, see Draws."""

    tower: Draws
    name: str
    rows_each: int | None

    def uniform(self, shape, dtype) -> tf.Tensor:
        return self.tower.of_layer(self.name, shape, dtype, self.rows_each)

    def normal(self, shape, dtype) -> tf.Tensor:
        return self.tower.of_layer(self.name, shape, dtype, self.rows_each, normal=True)

    def dropout(self, inputs: tf.Tensor, rate: float, noise_shape) -> tf.Tensor:
        return self.tower.dropout(self.name, inputs, rate, noise_shape, self.rows_each)
