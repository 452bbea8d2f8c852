"""multi_gpu_model for models of Keras 2 too; and what Keras 3 refuses of Keras 2, in a program of Keras."""

import functools
import inspect
import os
import re
import tempfile

import keras
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.keras_towers.model import TowerModel
from tower_train.fronts.multi_gpu_model import multi_gpu_model as keras_3_model

_RENAMED = {"lr": "learning_rate", "generator": "x", "nb_epoch": "epochs"}
_WITHOUT_EFFECT = {"workers", "use_multiprocessing", "max_queue_size", "max_q_size", "pickle_safe"}


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
    """Gives Keras 3 the methods of Keras 2, and what is named here the arguments that it had.

    is_named_acc: whether the program calls accuracy acc, as Keras did before 2.3; in logs it finds both.
    """
    for name in ("fit", "evaluate", "predict"):
        generating = f"{name}_generator"
        for owner in (keras.Model, TowerModel):
            setattr(owner, name, _taking(getattr(owner, name)))
        setattr(keras.Model, generating, _taking(_method(name), _order(getattr(tf_keras.Model, generating))))
    for name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"):
        optimizer = getattr(keras.optimizers, name)
        _decay(optimizer)
        order = ["learning_rate", "momentum", "decay", "nesterov"] if name == "SGD" else ()
        optimizer.__init__ = _taking(optimizer.__init__, order)
        setattr(keras.optimizers, name.lower(), optimizer)
    keras.optimizers.Optimizer.lr = keras.optimizers.Optimizer.learning_rate
    plateau = keras.callbacks.ReduceLROnPlateau
    plateau.__init__ = _taking(plateau.__init__, epsilon="min_delta")
    keras.callbacks.ModelCheckpoint = ModelCheckpoint
    compile_ = _naming_acc(keras.Model.compile) if is_named_acc else keras.Model.compile
    # Keras loads no compiled model whose class has another `compile` than this one.
    compat.trainer.Trainer.compile = _taking(compile_, _order(tf_keras.Model.compile))
    keras.Model.metrics_names = property(lambda model: [*keras.Model.get_metrics_result(model)])
    keras.Sequential.predict_proba, keras.Sequential.predict_classes = _method("predict"), _predict_classes
    keras.Model.save_weights = compat.save_weights_as_hdf5
    keras.Model.load_weights = _by_link(keras.Model.load_weights, 1)
    keras.Model.save, keras.models.save_model = _by_link(keras.Model.save, 1), _by_link(keras.models.save_model, 1)
    keras.models.load_model = _for_training(_by_link(keras.models.load_model, 0))
    keras.saving.get_custom_objects().update(mse=keras.losses.mean_squared_error, mae=keras.losses.mean_absolute_error)
    if is_named_acc:
        keras.callbacks.CallbackList.on_epoch_end = _naming_both(keras.callbacks.CallbackList.on_epoch_end)


def _method(name: str):
    return lambda model, *args, **kwargs: getattr(model, name)(*args, **kwargs)


def _order(method) -> list[str]:
    return [*inspect.signature(method).parameters][1:]


def _taking(function, order=(), **renamed):
    """Lets a method take arguments of Keras 2: in this order, under their names, None for a default."""

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        if order:
            args, kwargs = (), kwargs | dict(zip(order[: len(args)], args, strict=True))
        kept = {name: value for name, value in kwargs.items() if value is not None and name not in _WITHOUT_EFFECT}
        return function(self, *args, **{(_RENAMED | renamed).get(name, name): value for name, value in kept.items()})

    return call


def _decay(optimizer: type) -> None:
    """Gives a class of optimizers Keras 2's `decay`, beside the learning rate, which callbacks read and set."""
    init, update, config = optimizer.__init__, optimizer.update_step, optimizer.get_config

    @functools.wraps(init)
    def decaying(self, *args, decay=0.0, **kwargs):
        init(self, *args, **kwargs)
        self.decay = decay

    def update_step(self, gradient, variable, rate):
        share = 1 / (1 + self.decay * keras.ops.cast(self.iterations, rate.dtype)) if self.decay else 1
        return update(self, gradient, variable, rate * share)

    optimizer.__init__, optimizer.update_step = decaying, update_step
    optimizer.get_config = lambda self: config(self) | {"decay": self.decay}


def _predict_classes(model, *args, **kwargs):
    shares = model.predict(*args, **kwargs)
    return shares.argmax(-1) if shares.shape[-1] > 1 else (shares > 0.5).astype("int32")


def _naming_acc(compile_):
    def call(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_(self, *args, metrics=renamed, **kwargs)

    return call


def _naming_both(on_epoch_end):
    def call(self, epoch, logs):
        return on_epoch_end(self, epoch, {re.sub("acc$", "accuracy", name): logs[name] for name in logs} | logs)

    return call


def _by_link(function, position: int):
    """Lets a function save or load HDF5 under any name, its argument at a position: Keras asks for a suffix."""

    @functools.wraps(function)
    def call(*args, filepath=None, **kwargs):
        args = [*args[:position], path := str(filepath or args[position]), *args[position + 1 :]]
        has_suffix = path.endswith((".h5", ".hdf5", ".keras")) and not path.endswith(".weights.h5")  # Keras 3's own
        if has_suffix or ("load" in function.__name__ and not os.path.isfile(path)):
            return function(*args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            args[position] = os.path.join(folder, "model.h5")
            os.symlink(os.path.abspath(path), args[position])
            return function(*args, **kwargs)

    return call


def _for_training(load_model):
    def call(*args, **kwargs):
        model = load_model(*args, **kwargs)
        if model.optimizer and not compat.trained_by(model.optimizer):
            model.optimizer.built = False  # of HDF5 Keras builds it for no variables, and it would take no others
        return model

    return call


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras 2's: of each period-th epoch, under any name."""

    def __init__(self, filepath, *args, period=1, **kwargs):
        super().__init__("any.weights.h5", *args, **kwargs)
        self.filepath, self._period = str(filepath), period

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._period == 0:
            super().on_epoch_end(epoch, logs)
