"""multi_gpu_model: a Keras model that trains with one replica (tower) per device."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, placement, replicas
from tower_train.graph import gradients
from tower_train.graph.devices import HOST


def multi_gpu_model(model: keras.Model, gpus=None, cpu_merge: bool = True, cpu_relocation: bool = False):
    """Makes a model that computes what `model` computes, with every batch split over several devices.

    The arguments are those of the `keras.utils.multi_gpu_model` that TensorFlow removed. All training is Keras' own:
    `compile`, `fit` and their callbacks do what Keras documents. They train the weights of `model`, which can be used
    and saved as if nothing else had trained it.

        with tf.device("/cpu:0"):
            model = keras.applications.Xception(weights=None)
        parallel_model = tower_train.multi_gpu_model(model, gpus=8)
        parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
        parallel_model.fit(x, y, epochs=20, batch_size=256)  # the global batch: each GPU gets 32 examples
        model.save("my_model.keras")

    Args:
      model: the template. Its weights stay where they were created, which should be the CPU.
      gpus: how many towers, or a list of the GPUs that carry them, or None for all GPUs. Without GPUs a count of towers
        lives on the CPU.
      cpu_merge: whether the towers' outputs are joined, and the loss is computed, on the CPU; if not, on the first
        tower's device.
      cpu_relocation: whether to move the template's weights to the CPU.

    Returns:
      A `ParallelModel`.

    Raises:
      ConfigError: missing GPUs, or a model that cannot be split.
    """
    _check(model)
    placed = placement.place(gpus, "gpus")
    if cpu_relocation:
        _relocate(model)
    return ParallelModel(model, placed.towers, HOST if cpu_merge else placed.towers[0])


def _check(model) -> None:
    """Checks that a model can be split over towers.

    Raises:
      ConfigError: it cannot.
    """
    if not isinstance(model, keras.Model):
        raise errors.ConfigError(f"multi_gpu_model got a {type(model).__name__}; it needs a keras.Model.")
    if tf.distribute.has_strategy():
        raise errors.ConfigError(
            "multi_gpu_model was called in a tf.distribute strategy's scope. Use one of the two: leave the scope."
        )
    overridden = [
        name
        for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if overridden:
        raise errors.ConfigError(
            f"multi_gpu_model: {type(model).__name__} defines its own {', '.join(overridden)}, which towers would not "
            "call. Put the computation into call() and add_loss(), or into losses and metrics for compile()."
        )


class ParallelModel(keras.Model):
    """A Keras model whose batches are split over towers. All its weights are those of `template`."""

    def __init__(self, template: keras.Model, towers: tuple[str, ...], merge_device: str):
        super().__init__(name=f"parallel_{template.name}", dtype=template.dtype_policy)
        self.template = template
        self.towers = towers
        self._merge_device = merge_device
        self._compiles_template = not template.compiled

    def call(self, inputs, training=False):
        return self.template(inputs, training=training)

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        """Compiles as keras.Model.compile does, but for jit_compile=True: XLA compiles for one device.

        A template that was not compiled before is compiled alike, so that the optimizer's state is saved with it.
        """
        if kwargs.get("jit_compile") is True:
            raise errors.ConfigError("jit_compile=True: XLA compiles for one device only. Leave it out.")
        kwargs["jit_compile"] = False
        super().compile(optimizer, *args, **kwargs)
        if self._compiles_template:
            self.template.compile(self.optimizer, *args, **kwargs)

    def fit(self, x=None, y=None, batch_size=None, *args, **kwargs):
        """Trains as keras.Model.fit does; batch_size is the global batch.

        Raises:
          ConfigError: a batch_size that leaves towers without examples.
        """
        if batch_size is not None and batch_size < len(self.towers):
            raise errors.ConfigError(
                f"batch_size={batch_size} is the global batch, which {len(self.towers)} towers share out. Give at "
                f"least {len(self.towers)}, or fewer gpus."
            )
        return super().fit(x, y, batch_size, *args, **kwargs)

    def train_step(self, data):
        """Does a step: the towers' outputs, one loss of them all, the mean of the towers' gradients, one update.

        The loss is computed on the joined outputs, as on one device. So it is exact also if it is no mean over examples
        (masks, weights, a loss of the user's own) and if towers got unequal parts.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        towers = self._run_towers(x, training=True)
        weights = self.template.trainable_weights
        outputs = [tower.differentiable for tower in towers]
        with tf.device(self._merge_device), tf.GradientTape() as tape:
            tape.watch(outputs)
            y_pred = replicas.merge(towers)
            loss = self._loss(towers, x, y, y_pred, sample_weight, training=True)
            loss = self.optimizer.scale_loss(loss)
        with tf.device(self._merge_device):
            output_grads, penalty_grads = tape.gradient(loss, (outputs, [weight.value for weight in weights]))
        tower_grads = []
        for tower, grads in zip(towers, output_grads, strict=True):
            # Times the number of towers, so that the mean over towers is the gradient of this one loss.
            grads = [None if grad is None else grad * tf.cast(len(towers), grad.dtype) for grad in grads]
            tower_grads.append(list(zip(tower.gradients(grads), weights, strict=True)))
        with tf.device(HOST):
            replicas.assign_merged(self.template, towers)
            self._update(gradients.average_gradients(tower_grads), penalty_grads)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data):
        """Computes the loss and the metrics of a batch."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        towers = self._run_towers(x, training=False)
        with tf.device(self._merge_device):
            y_pred = replicas.merge(towers)
            self._loss(towers, x, y, y_pred, sample_weight, training=False)
        replicas.assign_merged(self.template, towers)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data):
        """Computes the outputs for a batch."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        towers = self._run_towers(x, training=False)
        with tf.device(self._merge_device):
            return replicas.merge(towers)

    def _run_towers(self, x, training: bool) -> list[replicas.Replica]:
        if not self.template.built:
            with tf.device(HOST):
                self.template(x)  # creates the weights
        return replicas.run(self.template, x, self.towers, training)

    def _loss(self, towers, x, y, y_pred, sample_weight, training: bool) -> tf.Tensor:
        """Computes the loss of the whole batch, and adds it to the mean that Keras reports as "loss"."""
        compat.clear_losses(self)
        for tower in towers:
            if tower.added_loss is not None:
                self.add_loss(tf.cast(tower.share, tower.added_loss.dtype) * tower.added_loss)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=training)
        compat.clear_losses(self)
        reported = next(metric for metric in self.metrics if metric.name == "loss")
        reported.update_state(loss, sample_weight=replicas.batch_size(x))
        return loss

    def _update(self, mean_grads: gradients.GradientsAndVariables, penalty_grads: list) -> None:
        """Applies the mean gradients, with those of the weights' regularizers added."""
        weights = self.template.trainable_weights
        if not self.optimizer.built:
            self.optimizer.build(weights)
        penalties = {id(weight): grad for weight, grad in zip(weights, penalty_grads, strict=True)}
        total = [
            (grad if penalties[id(weight)] is None else tf.convert_to_tensor(grad) + penalties[id(weight)], weight)
            for grad, weight in mean_grads
        ]
        self.optimizer.apply_gradients(total)

    def summary(self, *args, **kwargs):
        """Prints the template's summary and the towers' devices."""
        self.template.summary(*args, **kwargs)
        print_fn = kwargs.get("print_fn") or print
        print_fn(f"{len(self.towers)} towers: {', '.join(self.towers)}")

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

    def to_json(self, **kwargs):
        """Returns the template's architecture."""
        return self.template.to_json(**kwargs)


def _relocate(model: keras.Model) -> None:
    """Moves a model's variables to the CPU."""
    for variable in model.variables:
        there = tf.DeviceSpec.from_string(variable.value.device)
        if (there.device_type, there.device_index) != ("CPU", 0):
            value = variable.numpy()
            with tf.device(HOST):
                compat.set_storage(variable, value)
