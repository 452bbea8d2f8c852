"""multi_gpu_model for models of Keras 2 too; and what Keras 3 refuses of Keras 2, in a program of Keras."""

import functools
import inspect
import re

import keras
import tensorflow as tf
import tf_keras

from tower_train.fronts import compat, placement
from tower_train.fronts.keras_towers.model import TowerModel
from tower_train.fronts.multi_gpu_model import multi_gpu_model as keras_3_model

_RENAMED = {"lr": "learning_rate", "generator": "x", "nb_epoch": "epochs"}
_WITHOUT_EFFECT = {
    "workers", "use_multiprocessing", "max_queue_size", "max_q_size", "pickle_safe", "schedule_decay",
}  # fmt: skip
_ORDERS = {  # of optimizers' arguments
    "SGD": "learning_rate momentum decay nesterov",
    "RMSprop": "learning_rate rho epsilon decay",
    "Adagrad": "learning_rate epsilon decay",
    "Adadelta": "learning_rate rho epsilon decay",
    "Adam": "learning_rate beta_1 beta_2 epsilon decay amsgrad",
    "Adamax": "learning_rate beta_1 beta_2 epsilon decay",
    "Nadam": "learning_rate beta_1 beta_2 epsilon schedule_decay",
}


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Makes a model that computes as `model`, each tower with its rows of the batch; of Keras 2 and 3.

    gpus is a number of towers, or a list of GPUs; by default all GPUs. The variables are those of `model`.
    """
    if isinstance(model, keras.Model):
        return keras_3_model(model, gpus, cpu_merge, cpu_relocation)
    towers = placement.place(gpus, "gpus").towers
    if len(towers) < 2:
        return model
    outputs = []
    for position, device in enumerate(towers):
        with tf.device(device), tf.name_scope(f"replica_{position}"):
            rows = tf_keras.layers.Lambda(_rows, arguments={"position": position, "count": len(towers)})
            parts = [rows(each) for each in model.inputs]
            outputs.append(tf.nest.flatten(model(parts if len(parts) > 1 else parts[0])))
    with tf.device("/cpu:0" if cpu_merge else towers[0]):
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
    _add_decay()
    for name, order in _ORDERS.items():
        optimizer = getattr(keras.optimizers, name)
        optimizer.__init__ = _taking(optimizer.__init__, order.split())
        setattr(keras.optimizers, name.lower(), optimizer)
    keras.optimizers.Optimizer.lr = keras.optimizers.Optimizer.learning_rate
    plateau = keras.callbacks.ReduceLROnPlateau
    plateau.__init__ = _taking(plateau.__init__, epsilon="min_delta")
    keras.callbacks.ModelCheckpoint = ModelCheckpoint
    # Keras loads no compiled model whose class has another `compile` than this one.
    compile_ = _naming_acc(keras.Model.compile) if is_named_acc else keras.Model.compile
    compat.trainer.Trainer.compile = _taking(compile_, _order(tf_keras.Model.compile))
    keras.Model.metrics_names = property(lambda model: [*keras.Model.get_metrics_result(model)])
    keras.Sequential.predict_proba, keras.Sequential.predict_classes = _method("predict"), _predict_classes
    keras.Model.save_weights = compat.save_weights_as_hdf5
    keras.models.load_model = _for_training(keras.models.load_model)
    keras.saving.get_custom_objects().update(mse=keras.losses.mean_squared_error, mae=keras.losses.mean_absolute_error)
    if is_named_acc:
        compat.give_callbacks(lambda logs: logs | {re.sub("acc$", "accuracy", name): logs[name] for name in logs})


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


def _add_decay() -> None:
    """Gives optimizers Keras 2's `decay`, beside the learning rate, which callbacks read and set."""
    base = keras.optimizers.Optimizer
    init, config = base.__init__, base.get_config

    def decaying(self, *args, decay=0.0, **kwargs):
        init(self, *args, **kwargs)
        self.decay = decay

    def with_decay(update, _):
        return lambda self, gradient, variable, rate: update(
            self, gradient, variable, rate / (1 + self.decay * keras.ops.cast(self.iterations, rate.dtype))
        )

    base.__init__, base.get_config = decaying, lambda self: config(self) | {"decay": self.decay}
    compat.wrap_method(base, "update_step", with_decay)


def _naming_acc(compile_):
    def call(self, *args, metrics=None, **kwargs):
        renamed = ["acc" if each == "accuracy" else each for each in metrics] if isinstance(metrics, list) else metrics
        return compile_(self, *args, metrics=renamed, **kwargs)

    return call


def _predict_classes(model, *args, **kwargs):
    shares = model.predict(*args, **kwargs)
    return shares.argmax(-1) if shares.shape[-1] > 1 else (shares > 0.5).astype("int32")


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
