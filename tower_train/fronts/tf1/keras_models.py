"""multi_gpu_model for models of Keras 2 too; and what Keras 3 refuses of Keras 2, in a program of Keras."""

import functools

import keras
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.multi_gpu_model import multi_gpu_model as keras_3_model


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Makes a model that computes as `model`, each tower with its rows of the batch; of Keras 2 and 3.

    gpus is a number of towers, or a list of GPUs; by default all GPUs. The variables are those of `model`.
    """
    if isinstance(model, keras.Model):
        return keras_3_model(model, gpus, cpu_merge, cpu_relocation)
    here = len(tf.config.list_physical_devices("GPU"))
    towers = list(range(here or 1) if gpus is None else range(gpus) if isinstance(gpus, int) else gpus)
    if here and max(towers, default=0) >= here:
        raise errors.ConfigError(f"multi_gpu_model(gpus={gpus}): this machine has {here} GPUs. Ask for as many.")
    if len(towers) < 2:
        return model
    outputs = []
    for position, gpu in enumerate(towers):
        with tf.device(f"/gpu:{gpu}" if here else "/cpu:0"), tf.name_scope(f"replica_{gpu}"):
            rows = tf_keras.layers.Lambda(_rows, arguments={"position": position, "count": len(towers)})
            parts = [rows(each) for each in model.inputs]
            outputs.append(tf.nest.flatten(model(parts if len(parts) > 1 else parts[0])))
    with tf.device("/cpu:0" if cpu_merge or not here else f"/gpu:{towers[0]}"):
        named = zip(model.output_names, zip(*outputs, strict=True), strict=True)
        joined = [tf_keras.layers.concatenate(list(parts), axis=0, name=name) for name, parts in named]
    return tf_keras.Model(model.inputs, joined)


def _rows(batch: tf.Tensor, position: int, count: int) -> tf.Tensor:
    """Returns a tower's part of a batch, as equal as they can be."""
    size = tf.shape(batch)[0]
    return batch[size * position // count : size * (position + 1) // count]


def prepare(is_named_acc: bool) -> None:
    """Gives Keras 3 the methods and arguments of Keras 2.

    is_named_acc: whether the program calls the metric "accuracy" acc in logs, as Keras did before 2.3.
    """
    for name in ("fit", "evaluate", "predict"):
        for alias in (name, f"{name}_generator"):
            setattr(keras.Model, alias, _without_workers(getattr(keras.Model, name)))
    for name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"):
        optimizer = getattr(keras.optimizers, name)
        optimizer.__init__ = _with_decay(_renamed(optimizer.__init__, "lr", "learning_rate"))
        setattr(keras.optimizers, name.lower(), optimizer)
    plateau = keras.callbacks.ReduceLROnPlateau
    plateau.__init__ = _renamed(plateau.__init__, "epsilon", "min_delta")
    keras.callbacks.ModelCheckpoint = ModelCheckpoint
    keras.Model.save_weights = _under_any_name(keras.Model.save_weights)
    keras.saving.get_custom_objects().update(mse=keras.losses.mean_squared_error, mae=keras.losses.mean_absolute_error)
    if is_named_acc:
        keras.Model.compile = _naming_acc(keras.Model.compile)


def _without_workers(function):
    @functools.wraps(function)
    def call(*args, workers=1, use_multiprocessing=False, max_queue_size=10, max_q_size=10, **kwargs):
        return function(*args, **kwargs)

    return call


def _renamed(function, old: str, new: str):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **{new if name == old else name: value for name, value in kwargs.items()})

    return call


def _with_decay(init):
    @functools.wraps(init)
    def call(self, *args, decay=0.0, **kwargs):
        init(self, *args, **{name: value for name, value in kwargs.items() if value is not None})  # epsilon=None
        if decay:
            rate = float(self.learning_rate)
            self.learning_rate = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)

    return call


def _naming_acc(compile_):
    def call(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_(self, *args, metrics=renamed, **kwargs)

    return call


def _under_any_name(save_weights):
    def call(self, path, *args, **kwargs):
        uses_keras_3 = str(path).endswith(".weights.h5")
        return (save_weights if uses_keras_3 else compat.save_weights_as_hdf5)(self, path, *args, **kwargs)

    return call


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras 2's: of each period-th epoch, under any name."""

    def __init__(self, filepath, *args, period=1, **kwargs):
        super().__init__("any.weights.h5", *args, **kwargs)
        self.filepath, self._period = str(filepath), period

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._period == 0:
            super().on_epoch_end(epoch, logs)
