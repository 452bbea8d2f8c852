"""Names of Keras 2 that Keras 3 refuses: of arguments, methods, metrics and files, in a program of Keras."""

import functools

import h5py
import keras

from tower_train.fronts import compat

_SHORT_LOSSES = {  # which Keras 3 saves in HDF5 files and does not find when it loads them
    "mse": keras.losses.mean_squared_error, "mae": keras.losses.mean_absolute_error,
    "mape": keras.losses.mean_absolute_percentage_error, "msle": keras.losses.mean_squared_logarithmic_error,
    "kld": keras.losses.kl_divergence,
}  # fmt: skip
_WITHOUT_MEANING = ("workers", "use_multiprocessing", "max_queue_size", "max_q_size")


def _renamed(function, **old_names: str):
    """Returns a function that takes arguments by their old names too; an argument whose new name is "" is left out."""

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        kwargs = {old_names.get(name, name): value for name, value in kwargs.items() if old_names.get(name, name)}
        return function(*args, **kwargs)

    return call


def _optimizer(cls: type):
    @functools.wraps(cls, updated=())
    def make(*args, decay=0.0, **kwargs):
        if kwargs.get("epsilon", 0) is None:  # Keras 2: its default
            del kwargs["epsilon"]
        optimizer = _renamed(cls, lr="learning_rate")(*args, **kwargs)
        if decay:  # Keras 2: rate / (1 + decay * step)
            rate = float(optimizer.learning_rate)
            optimizer.learning_rate = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
        return optimizer

    return make


for _name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "Adamax", "Nadam"):
    globals()[_name] = _optimizer(getattr(keras.optimizers, _name))
ReduceLROnPlateau = _renamed(keras.callbacks.ReduceLROnPlateau, epsilon="min_delta")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras 2's: of each period-th epoch, under any name."""

    def __init__(self, filepath, *args, period=1, **kwargs):
        super().__init__("any.weights.h5", *args, **kwargs)
        self.filepath, self._period = str(filepath), period

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._period == 0:
            super().on_epoch_end(epoch, logs)


def load_model(filepath, custom_objects=None, compile=True):
    """Loads a model, of Keras 2 too."""
    if not h5py.is_hdf5(filepath):
        return keras.models.load_model(filepath, custom_objects, compile)
    return compat.load_model_of_hdf5(filepath, _SHORT_LOSSES | (custom_objects or {}), compile)


def _under_any_name(function, as_hdf5, *known: str):
    """Returns a function of a model and a file, which is HDF5 unless its name ends as Keras 3 knows it."""

    @functools.wraps(function)
    def call(model, filepath, *args, **kwargs):
        return (function if str(filepath).endswith(known) else as_hdf5)(model, filepath, *args, **kwargs)

    return call


def prepare(is_named_acc: bool) -> None:
    """Gives Keras' models the methods and arguments of Keras 2.

    is_named_acc: whether the program calls the metric "accuracy" acc in logs, as Keras did before 2.3.
    """
    model, compile_as_is = keras.Model, keras.Model.compile
    for name in ("fit", "evaluate", "predict"):
        for alias in (name, f"{name}_generator"):
            setattr(model, alias, _renamed(getattr(model, name), **dict.fromkeys(_WITHOUT_MEANING, "")))

    def compile_(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_as_is(self, *args, metrics=renamed, **kwargs)

    model.save = _under_any_name(model.save, compat.save_as_hdf5, ".keras", ".h5", ".hdf5")
    model.save_weights = _under_any_name(model.save_weights, compat.save_weights_as_hdf5, ".weights.h5")
    model.load_weights = _under_any_name(model.load_weights, compat.load_weights_of_hdf5, ".h5", ".hdf5", ".keras")
    if is_named_acc:
        model.compile = compile_
