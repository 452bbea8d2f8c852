"""The model of multi_gpu_model for a model with a `tower_step`."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts.own_steps import lockstep, parts, rehearsal
from tower_train.fronts.parallel_model import ParallelModel
from tower_train.graph import gradients
from tower_train.graph.devices import HOST


class StepModel(ParallelModel):
    """A Keras model whose training steps are its template's `tower_step`, run in all towers.

    Evaluation is the template's own, on the first tower's device. Prediction is split over the towers.
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
        """Runs a step in all towers, and returns the means of its report so far in this epoch."""
        with tf.device(HOST):
            if not self._progress.is_rehearsed:
                for optimizer, variables in rehearsal.rehearse(self.template, data, HOST, len(self.towers)):
                    if not optimizer.built:
                        optimizer.build(variables)
                self._progress.is_rehearsed = True
        logs = lockstep.run(self.template, data, self.towers, self._merge_device, _apply)
        with tf.device(HOST):
            examples = parts.batch_size(data)
            return logs.results | {name: self._progress.mean(name, logs.means[name], examples) for name in logs.means}

    def test_step(self, data):
        """Evaluates a batch as the template does."""
        with tf.device(self.towers[0]):
            return self.template.test_step(data)

    def predict_step(self, data):
        """Computes the outputs of a batch: in towers, unless the template has its own predict_step."""
        if type(self.template).predict_step is keras.Model.predict_step:
            return super().predict_step(data)
        with tf.device(self.towers[0]):
            return self.template.predict_step(data)


class _Progress:
    """The state of a compiled model's steps.

    Attributes:
      is_rehearsed: whether the variables exist.
      means: {name: mean over the epoch's examples} of the steps' results.
    """

    def __init__(self):
        self.is_rehearsed = False
        self.means: dict[str, keras.metrics.Mean] = {}

    def mean(self, name: str, value: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
        """Returns the mean so far of a value that is a mean over a step's examples."""
        if name not in self.means:
            self.means[name] = keras.metrics.Mean(name=name)
        self.means[name].update_state(value, sample_weight=examples)
        return self.means[name].result()


def _apply(optimizer: keras.optimizers.Optimizer, tower_grads: list[gradients.GradientsAndVariables]) -> None:
    """Averages the towers' gradients, and applies the mean."""
    optimizer.apply_gradients(gradients.average_gradients(tower_grads))
