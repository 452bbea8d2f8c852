"""Arguments and methods that Keras had until 2.2, in today's Keras; and multi_gpu_model for models of Keras 2."""

import functools
import inspect
import re
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from keras._tf_keras.keras.preprocessing.image import Iterator
from tf_keras.api._v1.keras import optimizers as optimizers_of_keras_2

from tower_train.fronts import compat, placement
from tower_train.fronts.keras_towers.model import TowerModel

_NOW = {  # {an argument's name: its name today; None: it has no effect}
    "lr": "learning_rate",
    "generator": "x",
    "nb_epoch": "epochs",
    "epsilon": "min_delta",
    **dict.fromkeys("workers use_multiprocessing max_queue_size max_q_size pickle_safe schedule_decay".split()),
    **dict.fromkeys("batch_size write_grads embeddings_layer_names embeddings_data".split()),  # of TensorBoard
}
_OPTIMIZERS = {  # {class: (learning rate by default, its further arguments in their order)}
    "SGD": (0.01, "momentum decay nesterov"),
    "RMSprop": (0.001, "rho epsilon decay"),
    "Adagrad": (0.01, "epsilon decay"),
    "Adadelta": (1.0, "rho epsilon decay"),
    "Adam": (0.001, "beta_1 beta_2 epsilon decay amsgrad"),
    "Adamax": (0.002, "beta_1 beta_2 epsilon decay"),
    "Nadam": (0.002, "beta_1 beta_2 epsilon schedule_decay"),
}


def prepare(uses_keras_3: bool, is_named_acc: bool) -> None:
    """Prepares today's Keras, or Keras 2, for a program of `import keras`.

    is_named_acc: whether the program calls accuracy acc, as Keras did before 2.3; Keras 3's logs then have both.
    """
    optimizers, sequential = optimizers_of_keras_2, tf_keras.Sequential
    if uses_keras_3:
        _prepare_keras_3(is_named_acc)
        optimizers, sequential = keras.optimizers, keras.Sequential
    else:
        compat.initialize_all_for_keras_2()
    for name, (rate, further) in _OPTIMIZERS.items():
        optimizer = getattr(optimizers, name)
        optimizer.__init__ = _taking(optimizer.__init__, ["learning_rate", *further.split()], learning_rate=rate)
        setattr(optimizers, name.lower(), optimizer)

    def logs_of_keras_2(logs: dict) -> dict:
        both = {re.sub("acc$", "accuracy", name): logs[name] for name in logs} if uses_keras_3 and is_named_acc else {}
        items = (logs | both).items()
        return {name: np.float64(value) if isinstance(value, float) else value for name, value in items}

    compat.give_callbacks(logs_of_keras_2, uses_keras_3)
    sequential.predict_proba, sequential.predict_classes = sequential.predict, _predict_classes


def _prepare_keras_3(is_named_acc: bool) -> None:
    for owner in (TowerModel, keras.Model):
        for name in ("fit", "evaluate", "predict"):
            method, generating = getattr(owner, name), f"{name}_generator"
            setattr(owner, name, _taking(method))
            convert = {"x": _yielding_tuples, "validation_data": _yielding_tuples}
            setattr(owner, generating, _taking(method, _order(getattr(tf_keras.Model, generating)), convert))
    _add_decay()
    dense = keras.layers.Dense
    dense.__init__ = _taking(dense.__init__, _order(dense.__init__), {"units": int})  # np.prod(shape) is one of NumPy's
    for callback in (keras.callbacks.ReduceLROnPlateau, keras.callbacks.TensorBoard):
        callback.__init__ = _taking(callback.__init__)
    keras.callbacks.ModelCheckpoint, Iterator.next = ModelCheckpoint, Iterator.__next__
    # in this class: Keras loads no compiled model of a class with a `compile` of its own
    convert = {"metrics": _named_acc} if is_named_acc else {}
    compat.trainer.Trainer.compile = _taking(keras.Model.compile, _order(tf_keras.Model.compile), convert)
    keras.Model.metrics_names = property(lambda model: [*keras.Model.get_metrics_result(model)])
    keras.Model.save_weights = compat.save_weights_as_hdf5
    keras.models.load_model = _for_training(keras.models.load_model)
    keras.saving.get_custom_objects().update(mse=keras.losses.mean_squared_error, mae=keras.losses.mean_absolute_error)


def _order(method) -> list[str]:
    return [*inspect.signature(method).parameters][1:]


def _yielding_tuples(batches):
    def tuples(value):  # a list of inputs is one of several
        return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value

    return (tuples(batch) for batch in batches) if inspect.isgenerator(batches) else batches


def _named_acc(metrics):
    return tf.nest.map_structure(lambda each: "acc" if each == "accuracy" else each, metrics)


def _taking(function, order=(), convert: dict[str, Callable] | None = None, **defaults):
    """Lets a method take arguments of Keras 2: in this order, under their names, None for a default."""
    own = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        if order:
            args, kwargs = (), defaults | dict(zip(order[: len(args)], args, strict=True)) | kwargs
        names = {name: name if name in own else _NOW.get(name, name) for name in kwargs}
        kept = {names[name]: value for name, value in kwargs.items() if names[name] and value is not None}
        changed = {name: change(kept[name]) for name, change in (convert or {}).items() if name in kept}
        return function(self, *args, **kept | changed)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # Keras reads that of __init__
    return call


def _add_decay() -> None:
    """Gives optimizers Keras 2's `lr` and `decay`, beside the learning rate, which callbacks read and set."""
    base = keras.optimizers.Optimizer
    init, config, update = base.__init__, base.get_config, base._backend_update_step

    def decaying(self, *args, decay=0.0, **kwargs):
        init(self, *args, **kwargs)
        self.decay = decay

    def decayed(self, gradients, variables, rate):
        update(self, gradients, variables, rate / (1 + self.decay * keras.ops.cast(self.iterations, rate.dtype)))

    base.__init__, base._backend_update_step, base.lr = decaying, decayed, base.learning_rate
    base.get_config = lambda self: config(self) | {"decay": self.decay}


def _predict_classes(model, *args, **kwargs):
    shares = model.predict(*args, **kwargs)
    return shares.argmax(-1) if shares.shape[-1] > 1 else (shares > 0.5).astype("int32")


def _for_training(load_model):
    def call(*args, **kwargs):
        model = load_model(*args, **kwargs)
        if model.optimizer and not compat.trained_by(model.optimizer):
            model.optimizer.built = False  # Keras built that of an HDF5 file for no variables, and it takes no others
        return model

    return call


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras 2's: saves every `period` epochs, to a file of any name."""

    def __init__(self, filepath, *args, period=1, **kwargs):
        super().__init__("any.weights.h5", *args, **kwargs)
        self.filepath, self._period = str(filepath), period

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._period == 0:
            super().on_epoch_end(epoch, logs)


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Makes a model that computes what `model`, of Keras 2, does, each tower on its rows of the batch.

    gpus is a number of towers, or a list of GPUs; by default all GPUs. The variables are those of `model`.
    """
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
    """Returns a tower's rows of a batch, divided as evenly as possible."""
    size = tf.shape(batch)[0]
    return batch[size * position // count : size * (position + 1) // count]
