"""The model of multi_gpu_model: Keras' own training, with the step done in towers."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, replicas
from tower_train.fronts.growth import Growth
from tower_train.graph import gradients
from tower_train.graph.devices import HOST


class ParallelModel(keras.Model):
    """A Keras model whose batches are split over towers. All its weights are those of `template`."""

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str):
        super().__init__(name=f"parallel_{template.name}", dtype=template.dtype_policy)
        self.template = template
        self.towers = self._all_towers = towers
        self._merge_device = merge_device
        self._compiles_template = not template.compiled
        self._template_metrics = list(compat.own_metrics(template))  # Keras reports those of a model's own attributes
        self._growth: dict[bool, Growth] = {}
        self.built = template.built

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

    def call(self, inputs, training=False):
        return self.template(inputs, training=training)

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        """Compiles as keras.Model.compile, except for jit_compile=True: XLA compiles for one device.

        A template that was not compiled is compiled alike, so that the optimizer's state is saved with it.
        """
        if kwargs.get("jit_compile") is True:
            raise errors.ConfigError("jit_compile=True: XLA compiles for one device only. Leave it out.")
        kwargs["jit_compile"] = False
        self._growth = {}
        super().compile(optimizer, *args, **kwargs)
        if self._compiles_template:
            self.template.compile(self.optimizer, *args, **kwargs)

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
        """Does a step: the towers' outputs, one loss of them all, the mean of the towers' gradients, one update.

        The loss is computed on the joined outputs, as on one device. So it is exact even if it is no mean over examples
        (masks, weights, a custom loss) and if towers got unequal parts.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        towers, growth = self._run_towers(x, training=True)
        towers, y, sample_weight = self._join_workers(towers, y, sample_weight, training=True)
        weights = self.template.trainable_weights
        outputs = [tower.differentiable for tower in towers]
        with tf.device(self._merge_device), tf.GradientTape() as tape:
            tape.watch(outputs)
            y_pred = replicas.merge(towers)
            loss = self._loss(towers, growth, x, y, y_pred, sample_weight, training=True)
            loss = self.optimizer.scale_loss(loss)
        with tf.device(self._merge_device):
            output_grads, penalty_grads = tape.gradient(loss, (outputs, [weight.value for weight in weights]))
        tower_grads = []
        for tower, grads in zip(towers, output_grads, strict=True):
            if not tower.is_here:
                continue
            # Times the number of towers, so that the mean over towers is the gradient of this one loss.
            grads = [None if grad is None else len(towers) * tf.convert_to_tensor(grad) for grad in grads]
            tower_grads.append(list(zip(tower.gradients(grads), weights, strict=True)))
        with tf.device(HOST):
            replicas.assign_merged(self.template, towers, growth)
            self._update(self._average(tower_grads), penalty_grads)
        return self._compiled.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data):
        """Computes the loss and the metrics of a batch."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        towers, growth = self._run_towers(x, training=False)
        towers, y, sample_weight = self._join_workers(towers, y, sample_weight, training=False)
        with tf.device(self._merge_device):
            y_pred = replicas.merge(towers)
            self._loss(towers, growth, x, y, y_pred, sample_weight, training=False)
        replicas.assign_merged(self.template, towers, growth)
        return self._compiled.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def _compiled(self) -> keras.Model:
        """The model that has the loss and the metrics."""
        return self

    def predict_step(self, data):
        """Computes the outputs of a batch."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        towers, growth = self._run_towers(x, training=False, devices=self.towers)
        replicas.assign_merged(self.template, towers, growth)
        with tf.device(self._merge_device):
            return replicas.merge(towers)

    def _join_workers(self, towers: list[replicas.Replica], y, sample_weight, training: bool):
        """Returns the towers and the labels of a whole batch, if other processes run some of them."""
        return towers, y, sample_weight

    def _average(self, tower_grads: list[gradients.GradientsAndVariables]) -> gradients.GradientsAndVariables:
        return gradients.average_gradients(tower_grads)

    def _run_towers(self, x, training: bool, devices=None) -> tuple[list[replicas.Replica], Growth]:
        if not self.template.built:
            with tf.device(HOST):
                self.template(x)  # creates the weights
        towers = replicas.run(self.template, x, devices or self._all_towers, training)
        if training not in self._growth:
            self._growth[training] = replicas.find_growth(self.template, towers, x, training)
        return towers, self._growth[training]

    def _loss(self, towers, growth, x, y, y_pred, sample_weight, training: bool) -> tf.Tensor:
        """Computes the loss of the whole batch, and adds it to the mean that Keras reports as "loss"."""
        compiled = self._compiled
        compat.clear_losses(compiled)
        keras.Layer.add_loss(compiled, replicas.merge_losses(towers, growth))  # which a Functional model has not
        loss = compiled.compute_loss(x, y, y_pred, sample_weight, training=training)
        compat.clear_losses(compiled)
        reported = next(metric for metric in compiled.metrics if metric.name == "loss")
        reported.update_state(loss, sample_weight=replicas.batch_size(x))
        return loss

    def _update(self, mean_grads: gradients.GradientsAndVariables, penalty_grads: list) -> None:
        """Applies the mean gradients, with those of the weights' regularizers added."""
        weights = self.template.trainable_weights
        if not self.optimizer.built:
            self.optimizer.build(weights)
        means = {id(weight): grad for grad, weight in mean_grads}
        total = [
            (_sum(means.get(id(weight)), grad), weight) for weight, grad in zip(weights, penalty_grads, strict=True)
        ]
        self.optimizer.apply_gradients([(grad, weight) for grad, weight in total if grad is not None])

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
        raise errors.ConfigError("A ParallelModel has no configuration of its own. Clone its template instead.")

    def to_json(self, **kwargs):
        """Returns the template's architecture."""
        return self.template.to_json(**kwargs)


def _sum(grad, penalty_grad):
    """Adds two gradients, each of which may be None; the first one may be sparse."""
    if grad is None or penalty_grad is None:
        return penalty_grad if grad is None else grad
    return tf.convert_to_tensor(grad) + penalty_grad
