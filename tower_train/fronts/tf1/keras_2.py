"""What Keras 2 had until 2.2, and the package tf_keras has no longer."""

import functools

import tensorflow as tf
import tf_keras

from tower_train.fronts import placement

_OPTIMIZERS = {  # {class: (learning rate by default, its further arguments in their order)}
    "SGD": (0.01, "momentum decay nesterov"),
    "RMSprop": (0.001, "rho epsilon decay"),
    "Adagrad": (0.01, "epsilon decay"),
    "Adadelta": (1.0, "rho epsilon decay"),
    "Adam": (0.001, "beta_1 beta_2 epsilon decay amsgrad"),
    "Adamax": (0.002, "beta_1 beta_2 epsilon decay"),
    "Nadam": (0.002, "beta_1 beta_2 epsilon schedule_decay"),
}


def prepare() -> None:
    """Gives tf_keras the arguments of optimizers, and methods, that the package keras had."""
    for name, (rate, further) in _OPTIMIZERS.items():
        optimizer = getattr(tf_keras.optimizers.legacy, name)
        optimizer.__init__ = _taking(optimizer.__init__, rate, ["learning_rate", *further.split()])
    tf_keras.Sequential.predict_proba, tf_keras.Sequential.predict_classes = tf_keras.Model.predict, _predict_classes


def _taking(init, rate: float, order: list[str]):
    @functools.wraps(init)
    def call(self, *args, **kwargs):
        return init(self, **{"learning_rate": rate} | dict(zip(order, args, strict=False)) | kwargs)

    return call


def _predict_classes(model, *args, **kwargs):
    shares = model.predict(*args, **kwargs)
    return shares.argmax(-1) if shares.shape[-1] > 1 else (shares > 0.5).astype("int32")


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Makes a model that computes as `model`, of Keras 2, each tower with its rows of the batch.

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
    """Returns a tower's part of a batch, as equal as they can be."""
    size = tf.shape(batch)[0]
    return batch[size * position // count : size * (position + 1) // count]
