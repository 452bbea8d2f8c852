"""The model of multi_gpu_model: Keras' own training, with each step done by towers that meet."""

import contextlib
import functools
import operator
from collections.abc import Callable

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, parts, placement
from tower_train.fronts.keras_towers import fit, proof, together
from tower_train.fronts.keras_towers.calls import check_shares, explained
from tower_train.fronts.keras_towers.exchange import ALONE, Exchange
from tower_train.fronts.keras_towers.step import Program, Step, rehearse
from tower_train.graph import xla
from tower_train.graph.devices import HOST


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
    ):
        super().__init__(name=f"parallel_{template.name}", dtype=template.dtype_policy)
        self.template, self.towers, self.num_towers = template, towers, len(towers) * exchange.size
        self._is_compared = check_towers == "never" or self.num_towers == 1
        self.merge_device, self.exchange, self.batch_norm_over = merge_device, exchange, batch_norm
        self._train = fit.own if compat.is_overridden(template, "train_step") else fit.train
        self.built, self._compiled = template.built, None
        together.begin(exchange, template, len(towers))
        self.begun_with: list | None = None  # the optimizers, once they have their variables
        self._assigned: Callable[[], list] = list  # further variables of a step; Keras would take a list for weights
        self.compile_as_template()

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
        """Returns whether `fit` ends after this batch or epoch."""
        return self.template.stop_training

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if "template" in self.__dict__:  # else Keras is making this model
            self.template.stop_training = value

    def get_metrics_result(self):
        """Returns the template's, which Keras reports instead of a step's results of the same names."""
        return self.template.get_metrics_result()

    def call(self, inputs, training=False):
        return self.template(inputs, training=training)

    def compile(self, *args, **kwargs):
        """Compiles the template, with the arguments of its own `compile`; ConfigError for eager steps."""
        self.template.compile(*args, **kwargs)
        self._compiled = None
        self.compile_as_template()

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
        batches, spec = proof.first_batches((x, y, sample_weight), self.num_towers)
        return proof.compare_steps(self, batches, spec).proved().line

    def of_towers(self, count: int, batch_norm: str) -> "TowerModel":
        """Returns the same in so many towers of this process alone, whose variables are there, for a comparison."""
        devices = (self.towers * self.exchange.size)[:count]
        several = TowerModel(self.template, devices, self.merge_device, ALONE, batch_norm, "never")
        several.begun_with = []
        return several

    def make_train_function(self, force=False):
        """Makes Keras' function of a step; its first call compares towers with one device."""
        is_made = self.train_function is not None and not force
        super().make_train_function(force)
        if not (is_made or self._is_compared):
            self.train_function = proof.first_step(self, self.train_function)

    @property
    def trained_variables(self) -> list[keras.Variable | tf.Variable]:
        """The variables of the model and of its optimizers, and what else a step assigns."""
        of_optimizers = [v for each in self.begun_with or () for v in each.variables]
        return [*self.template.variables, *of_optimizers, *self._assigned()]

    @property
    def has_own_step(self) -> bool:
        """Returns whether the template has a train_step of its own."""
        return self._train is fit.own

    @property
    def is_compiled(self) -> bool:
        """Returns whether towers' passes are compiled by XLA: as Keras would compile the template's step."""
        return bool(getattr(self.template, "jit_compile", False))

    @property
    def is_one_device(self) -> bool:
        """Returns whether the template's own steps, which Keras compiles as a whole, train as the only tower would: on
        the device that Keras takes, with all weights on it."""
        tower = self.towers[0]
        if self.num_towers > 1 or tower not in ("/gpu:0", "/cpu:0"):
            return False
        return tower == "/cpu:0" or all(placement.of(each) != HOST for each in placement.weights(self.template))

    def compile_as_template(self) -> None:
        """Trains with what the template is compiled with, if that is not so yet."""
        now, then = compat.compiled(self.template), self._compiled
        if not self.template.compiled or then and all(map(operator.is_, now, then)):
            return
        self._compiled, self.begun_with, self._assigned = now, None, list
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
            self.rehearse(data, fit.predict, begins=False)
        return Step(self, data, ALONE).do(fit.predict)[0]

    def rehearse(self, data, program: Program | None = None, begins: bool = True) -> tuple[list, list]:
        """Makes all variables that a step on a batch needs, as step.rehearse, of the training's program unless it is
        another. If the step begins, all workers get the chief's."""
        optimizers, assigned = rehearse(self.template, program or self._train, data, self.towers)
        if begins:
            sent = [each for each in assigned if together.can_be_sent(each)]
            self.begun_with, self._assigned = optimizers or None, lambda: sent  # none of an evaluation
            together.synchronize(self.exchange, self.trained_variables)
        return optimizers, assigned

    def train_around(self, data, around: Callable) -> list:
        """Does a step in each tower as around(function that does it) says; returns over towers what that returned."""
        data = keras.tree.map_structure(parts.as_tensor, data)
        return Step(self, data, self.exchange).do(lambda model, part: around(lambda: self._train(model, part)))

    def _run_step(self, program: Program, data) -> dict[str, tf.Tensor]:
        """Does a step in all towers; returns its report."""
        data = keras.tree.map_structure(parts.as_tensor, data)
        if self.begun_with is None:
            self.rehearse(data, program)
        self.exchange.begin("evaluation" if program is fit.test else "training", data)
        step = Step(self, data, self.exchange)
        if program is fit.own:
            with tf.device(HOST):
                check_shares(step)
        returned = step.do(program)
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
