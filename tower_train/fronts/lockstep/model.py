"""The model of multi_gpu_model: Keras' own training, with each step done in lockstep by towers."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.lockstep import default_step, engine, merges, parts
from tower_train.fronts.lockstep.exchange import Exchange, alone
from tower_train.fronts.lockstep.tower import Step
from tower_train.graph.devices import HOST


class TowerModel(keras.Model):
    """A Keras model whose batches are split over towers. All its weights are those of `template`.

    A training step is the template's `tower_step`, by default that of Keras' fit. A test_step or predict_step of the
    template's own runs on the first tower's device.
    """

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str):
        super().__init__(name=f"parallel_{template.name}", dtype=template.dtype_policy)
        self.template = template
        self.towers = self._all_towers = towers
        self._merge_device = merge_device
        self._train = getattr(type(template), "tower_step", default_step.train)
        self.built = template.built
        self._begin_anew()
        if template.compiled:
            self._compile_as_template()

    def __getattr__(self, name):
        """Looks up other attributes in the template: its inputs, output_names, and the user's own."""
        if name.startswith("_") or name == "template":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.template, name)

    @property
    def layers(self):
        """The template's layers."""
        return self.template.layers

    @property
    def input(self):
        """The template's symbolic input."""
        return self.template.input

    @property
    def output(self):
        """The template's symbolic output."""
        return self.template.output

    @property
    def metrics(self):
        """The template's metrics, and the means of its steps' results."""
        return [*self.template.metrics, *self._means.values()]

    def get_metrics_result(self):
        """Returns nothing, so that Keras reports the step's results."""
        return {}

    def call(self, inputs, training=False):
        return self.template(inputs, training=training)

    def compile(self, *args, **kwargs):
        """Compiles the template, with the arguments of its own `compile`; ConfigError for jit_compile=True."""
        if kwargs.get("jit_compile") is True:
            raise errors.ConfigError("jit_compile=True: XLA compiles for one device only. Leave it out.")
        self.template.compile(*args, **kwargs)
        self._begin_anew()
        self._compile_as_template()

    def _begin_anew(self) -> None:
        self._trained: engine.Trained | None = None  # None before the optimizers have their variables
        self._means: dict[str, keras.metrics.Mean] = {}  # over the epoch's examples, of what steps return

    def _compile_as_template(self) -> None:
        template = self.template
        about = dict(run_eagerly=template.run_eagerly, steps_per_execution=template.steps_per_execution)
        super().compile(template.optimizer, jit_compile=False, **about)

    def fit(self, x=None, y=None, batch_size=None, *args, **kwargs):
        """Trains as keras.Model.fit; batch_size is the global batch, of at least an example per tower."""
        count = len(self._all_towers)
        if batch_size is not None and batch_size < count:
            raise errors.ConfigError(
                f"batch_size={batch_size} is the global batch, which {count} towers share out. Give at least {count}, "
                "or fewer gpus."
            )
        return super().fit(x, y, batch_size, *args, **kwargs)

    def train_step(self, data):
        """Does a step in all towers, and returns the epoch's metrics, and means of what else the step reports."""
        return self._run_step(self._train, data)

    def test_step(self, data):
        """Evaluates a batch."""
        if compat.is_overridden(self.template, "test_step"):
            with tf.device(self.towers[0]):
                return self.template.test_step(data)
        return self._run_step(default_step.test, data)

    def predict_step(self, data):
        """Computes the outputs of a batch, in this process's towers."""
        if compat.is_overridden(self.template, "predict_step"):
            with tf.device(self.towers[0]):
                return self.template.predict_step(data)
        if not self.template.built:
            engine.rehearse(self.template, default_step.predict, data, len(self.towers))
        places = engine.Places(self.towers, self._merge_device)
        _, [outputs, *_] = engine.run(self.template, default_step.predict, data, places)
        return outputs

    def _run_step(self, step: Step, data) -> dict[str, tf.Tensor]:
        """Does a step in all towers; returns the epoch's metrics, and means of what else it reports."""
        data = keras.tree.map_structure(parts.as_tensor, data)
        if self._trained is None:
            self.prepare(step, data)
        places = engine.Places(self._all_towers, self._merge_device, self._exchange(step, data))
        meeting, returned = engine.run(self.template, step, data, places)
        with tf.device(HOST):
            logs: merges.Logs = meeting.logs(returned)
            examples = parts.batch_size(data)
            return logs.results | {name: self._mean(name, value, examples) for name, value in logs.means.items()}

    def prepare(self, step: Step, data) -> None:
        """Makes the variables that the steps need."""
        trained = engine.rehearse(self.template, step, data, len(self._all_towers))
        with compat.eager_mode(), tf.device(HOST):
            for optimizer, variables in trained:
                if not optimizer.built:
                    optimizer.build(variables)
        self._trained = trained or None  # of an evaluation

    def _exchange(self, step: Step, data) -> Exchange:
        """Begins a step with other processes, if there are any; data: its batch."""
        return alone

    def _mean(self, name: str, value: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
        """Returns the mean so far of a value that is a mean over a step's examples."""
        if name not in self._means:
            self._means[name] = keras.metrics.Mean(name=name)
        self._means[name].update_state(value, sample_weight=examples)
        return self._means[name].result()

    def summary(self, *args, **kwargs):
        """Prints the template's summary and the towers' devices."""
        self.template.summary(*args, **kwargs)
        print_fn = kwargs.get("print_fn") or print
        print_fn(f"{len(self.towers)} towers: {', '.join(self.towers)}")

    def get_layer(self, name=None, index=None):
        """Returns a layer of the template, or the template itself by its name."""
        return self.template if name == self.template.name else self.template.get_layer(name, index)

    # A file of this model is one of the template, which can be loaded anywhere.
    def save(self, *args, **kwargs):
        """Saves the template."""
        return self.template.save(*args, **kwargs)

    def save_weights(self, *args, **kwargs):
        """Saves the template's weights."""
        return self.template.save_weights(*args, **kwargs)

    def load_weights(self, *args, **kwargs):
        """Loads weights that were saved by the template."""
        return self.template.load_weights(*args, **kwargs)

    def export(self, *args, **kwargs):
        """Exports the template."""
        return self.template.export(*args, **kwargs)

    def get_config(self):
        """Returns the template's configuration."""
        return self.template.get_config()

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Raises ConfigError, since Keras would use it to clone the model."""
        raise errors.ConfigError("A TowerModel has no configuration of its own. Clone its template instead.")

    def to_json(self, **kwargs):
        """Returns the template's architecture."""
        return self.template.to_json(**kwargs)
