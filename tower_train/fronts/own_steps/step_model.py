"""The model of multi_gpu_model for a model with a `tower_step`."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.own_steps import lockstep, parts, rehearsal
from tower_train.fronts.own_steps.exchange import Exchange, alone
from tower_train.fronts.parallel_model import ParallelModel
from tower_train.graph import gradients
from tower_train.graph.devices import HOST


class StepModel(ParallelModel):
    """A Keras model whose training steps are its template's `tower_step`, run in all towers.

    Evaluation and prediction are split over the towers; a test_step or predict_step of the template's own runs on the
    first one's device.
    """

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str):
        super().__init__(template, towers, merge_device)
        self._progress = _Progress()

    @property
    def metrics(self):
        """The template's metrics, and the means of its steps' results."""
        return [*self.template.metrics, *self._progress.means.values()]

    def get_metrics_result(self):
        """Returns nothing, so that Keras reports the step's results."""
        return {}

    def compile(self, *args, **kwargs):
        """Compiles the template, with the arguments of its own `compile`; ConfigError for jit_compile=True."""
        if kwargs.get("jit_compile") is True:
            raise errors.ConfigError("jit_compile=True: XLA compiles for one device only. Leave it out.")
        self.template.compile(*args, **kwargs)
        self._progress = _Progress()
        keras.Model.compile(
            self,
            self.template.optimizer,
            run_eagerly=self.template.run_eagerly,
            steps_per_execution=self.template.steps_per_execution,
            jit_compile=False,
        )

    def train_step(self, data):
        """Runs a step in all towers, and returns the means so far in this epoch of what it reports."""
        if self._progress.trained is None:
            with compat.eager_mode(), tf.device(HOST):  # so that variables have their values now
                self._progress.trained = rehearsal.rehearse(self.template, data, HOST, len(self._all_towers))
                for optimizer, variables in self._progress.trained:
                    if not optimizer.built:
                        optimizer.build(variables)
                self._begin_steps()
        places = lockstep.Places(self._all_towers, self._merge_device, self._exchange(data))
        logs = lockstep.run(self.template, data, places, self._apply)
        with tf.device(HOST):
            examples = parts.batch_size(data)
            return logs.results | {name: self._progress.mean(name, logs.means[name], examples) for name in logs.means}

    def test_step(self, data):
        """Evaluates a batch: in towers, unless the template has a way of its own."""
        if type(self.template).test_step is keras.Model.test_step:
            return super().test_step(data)
        with tf.device(self.towers[0]):
            return self.template.test_step(data)

    @property
    def _compiled(self) -> keras.Model:
        return self.template

    def _begin_steps(self) -> None:
        """Called once all variables are there."""

    def _exchange(self, data) -> Exchange:
        """Called at the beginning of each step; data: its batch."""
        return alone

    def _apply(self, optimizer: keras.optimizers.Optimizer, tower_grads: list[gradients.GradientsAndVariables]) -> None:
        """Averages the towers' gradients, and applies the mean."""
        optimizer.apply_gradients(self._average(tower_grads))

    def predict_step(self, data):
        """Computes the outputs of a batch: in towers, unless the template has its own predict_step."""
        if type(self.template).predict_step is keras.Model.predict_step:
            return super().predict_step(data)
        with tf.device(self.towers[0]):
            return self.template.predict_step(data)


class _Progress:
    """The state of a compiled model's steps.

    Attributes:
      trained: over optimizers, all the variables that they train; None before they are there.
      means: {name: mean over the epoch's examples} of what steps return.
    """

    def __init__(self):
        self.trained: rehearsal.Trained | None = None
        self.means: dict[str, keras.metrics.Mean] = {}

    def mean(self, name: str, value: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
        """Returns the mean so far of a value that is a mean over a step's examples."""
        if name not in self.means:
            self.means[name] = keras.metrics.Mean(name=name)
        self.means[name].update_state(value, sample_weight=examples)
        return self.means[name].result()
