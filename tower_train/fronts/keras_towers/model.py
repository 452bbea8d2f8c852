"""The model of multi_gpu_model: Keras' own training, with each step done by towers that meet."""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, parts, placement
from tower_train.fronts.keras_towers import fit, proof, together
from tower_train.fronts.keras_towers.calls import explained
from tower_train.fronts.keras_towers.exchange import ALONE, Exchange
from tower_train.fronts.keras_towers.layers import Summed
from tower_train.fronts.keras_towers.step import Program, Step, rehearse
from tower_train.graph import xla
from tower_train.graph.devices import HOST
from tower_train.proof.comparison import Outcome


class TowerModel(keras.Model):
    """A Keras model whose batches are split over towers. All its weights are those of `template`.

    A training step is the template's own `train_step`, by default that of Keras' fit. A test_step or predict_step of
    the template's own runs on one device. What it saves is the template, which can be loaded anywhere.
    """

    def __init__(
        self,
        template: keras.Model,
        towers: tuple[str, ...],
        merge_device: str,
        exchange: Exchange = ALONE,
        batch_norm: str = "global",
        check_towers: str = "auto",
        summed: Summed | None = None,
    ):
        super().__init__(name=f"parallel_{template.name}", dtype=template.dtype_policy)
        self.summed = summed or Summed()
        self._is_compared = check_towers == "never" or len(towers) * exchange.size == 1
        self.template, self.towers = template, towers
        self.merge_device, self.exchange, self.batch_norm_over = merge_device, exchange, batch_norm
        self._train = fit.own if compat.is_overridden(template, "train_step") else fit.train
        self.built, self._compiled = template.built, compat.compiled(template)
        together.begin(exchange, template, len(towers))
        self._optimizers: list | None = None  # None before they have their variables
        if template.compiled:
            self._compile_as_template()

    def __getattr__(self, name):
        """Looks up other attributes in the template: its inputs, output_names, and the user's own."""
        if name.startswith("_") or name == "template":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.template, name)

    layers = property(lambda self: self.template.layers)
    input = property(lambda self: self.template.input)
    output = property(lambda self: self.template.output)
    metrics = property(lambda self: self.template.metrics)

    @property
    def stop_training(self) -> bool:
        """Whether `fit` ends after this batch or epoch."""
        return self.template.stop_training

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if "template" in self.__dict__:  # else Keras is making this model
            self.template.stop_training = value

    def get_metrics_result(self):
        """Returns nothing, so that Keras reports the step's results."""
        return {}

    def call(self, inputs, training=False):
        return self.template(inputs, training=training)

    def compile(self, *args, **kwargs):
        """Compiles the template, with the arguments of its own `compile`; ConfigError for eager steps."""
        self.template.compile(*args, **kwargs)
        self._optimizers = None
        self._compile_as_template()

    def check(self, x, y=None, sample_weight=None) -> str:
        """Shows on the first of these examples that the towers train what one device trains, by Keras' own step or the
        model's. All variables are as before after it. Of several workers each compares by itself as many towers as all
        have.

        Args:
          x, y, sample_weight: as `fit` takes them; a generator loses the batches that are read.

        Returns:
          A line for people.

        Raises:
          ConfigError: too few examples.
          GraphError: the towers differ by more than rounding; the message names the variable.
        """
        data = x, y, sample_weight
        return self._compare(proof.first_batches(data, len(self.towers) * self.exchange.size)).proved().line

    def _compare(self, batches, is_first: bool = False) -> Outcome:
        devices = self.towers * self.exchange.size

        def towers(count: int, batch_norm: str) -> TowerModel:
            return TowerModel(
                self.template, devices[:count], self.merge_device, ALONE, batch_norm, "never", self.summed
            )

        def rehearsed(batch) -> tuple:
            optimizers, assigned = rehearse(self.template, self._train, batch, self.towers)
            if is_first:
                self._begin(optimizers)
            return optimizers, assigned

        return proof.compare_steps(
            towers, self.template, batches, len(devices), self.batch_norm_over, rehearsed, is_first=is_first
        )

    def make_train_function(self, force=False):
        """Makes Keras' function of a step; its first call compares towers with one device."""
        is_made = self.train_function is not None and not force
        super().make_train_function(force)
        if not (is_made or self._is_compared):
            compare = functools.partial(self._compare, is_first=True)
            self.train_function = proof.first_step(self, self.train_function, compare)

    @property
    def trained_variables(self) -> list[keras.Variable]:
        """The variables of the model and of its optimizers."""
        return [*self.template.variables, *(v for each in self._optimizers or () for v in each.variables)]

    @property
    def is_compiled(self) -> bool:
        """Returns whether towers' passes are compiled by XLA: as Keras would compile the template's step."""
        return bool(getattr(self.template, "jit_compile", False))

    @property
    def is_one_device(self) -> bool:
        """Returns whether the template's own steps, which Keras compiles as a whole, train as the only tower would: on
        the device that Keras takes, with all weights on it."""
        tower = self.towers[0]
        if len(self.towers) * self.exchange.size > 1 or tower not in ("/gpu:0", "/cpu:0"):
            return False
        return tower == "/cpu:0" or all(placement.of(each) != HOST for each in placement.weights(self.template))

    def compile_as_template(self) -> None:
        """Trains with what the template has been compiled with, if that was since."""
        if self.template.compiled and any(
            now is not then for now, then in zip(compat.compiled(self.template), self._compiled, strict=True)
        ):
            self._optimizers = None
            self._compile_as_template()

    def _compile_as_template(self) -> None:
        self._compiled = compat.compiled(self.template)
        if self.template.run_eagerly:
            raise errors.ConfigError(
                "run_eagerly=True: the towers' step is a graph of several devices. Leave it out; to debug, fit the "
                "model itself, which trains the same."
            )
        steps = self.template.steps_per_execution
        super().compile(self.template.optimizer, jit_compile=False, run_eagerly=False, steps_per_execution=steps)

    def train_step(self, data):
        """Does a step in all towers, and returns the epoch's metrics, and what else the step reports of this batch."""
        return self._run_step(self._train, data)

    def test_step(self, data):
        """Evaluates a batch."""
        if compat.is_overridden(self.template, "test_step"):
            return self.template.test_step(data)
        return self._run_step(fit.test, data)

    def predict_step(self, data):
        """Computes the outputs of a batch, in this process's towers."""
        if compat.is_overridden(self.template, "predict_step"):
            return self.template.predict_step(data)
        if not self.template.built:
            rehearse(self.template, fit.predict, data, self.towers)
        return Step(self, data, ALONE).run(fit.predict)[0]

    def _begin(self, optimizers: list[keras.optimizers.Optimizer]) -> None:
        """Notes the optimizers, which have their variables; all workers begin with the chief's."""
        self._optimizers = optimizers or None  # none of an evaluation
        together.synchronize(self.exchange, self.trained_variables)

    def train_around(self, data, around: Callable) -> list:
        """Does a step in each tower as around(function that does it) says; returns over towers what that returned."""
        data = keras.tree.map_structure(parts.as_tensor, data)
        return Step(self, data, self.exchange).run(lambda model, part: around(lambda: self._train(model, part)))

    def _run_step(self, program: Program, data) -> dict[str, tf.Tensor]:
        """Does a step in all towers; returns its report."""
        data = keras.tree.map_structure(parts.as_tensor, data)
        if self._optimizers is None:
            self._begin(rehearse(self.template, program, data, self.towers)[0])
        self.exchange.begin("evaluation" if program is fit.test else "training", data)
        step = Step(self, data, self.exchange)
        returned = step.run(program)
        if program is not fit.own:
            return returned[0]
        with tf.device(HOST):
            return step.logs(returned)


def _template_attribute(name: str):
    """Delegates a method of keras.Model to the template; only the chief saves."""

    @functools.wraps(getattr(keras.Model, name))
    def method(self, *args, **kwargs):
        if self.exchange.is_chief or not name.startswith("save"):
            return getattr(self.template, name)(*args, **kwargs)

    return method


def _together(name: str):
    """Wraps a method of keras.Model that all processes call together."""

    @functools.wraps(method := getattr(keras.Model, name))
    def in_all_workers(self, *args, **kwargs):
        self.compile_as_template()
        if self.is_one_device:
            with explained():
                return getattr(self.template, name)(*args, **kwargs)
        for_xla = compat.functions_run_by(xla.leave_to_xla) if self.is_compiled else contextlib.nullcontext()
        with explained(), for_xla:
            return together.call(method, self, args, kwargs)

    return in_all_workers


compat.save_as(TowerModel, "template", lambda model: model.exchange.is_chief)
for _name in ("save", "save_weights", "load_weights", "export", "get_config", "to_json", "summary", "get_layer"):
    setattr(TowerModel, _name, _template_attribute(_name))
for _name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
    setattr(TowerModel, _name, _together(_name))
