"""keras.utils.multi_gpu_model for models of Keras 2 too, which compute in graphs of TensorFlow 1."""

import keras
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train.fronts.multi_gpu_model import multi_gpu_model as of_keras_3


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Makes a model that computes as `model`, each tower with its rows of the batch; of Keras 2 and 3.

    gpus is a number of towers, or a list of GPUs; by default all GPUs. The variables are those of `model`.
    """
    if isinstance(model, keras.Model):
        return of_keras_3(model, gpus, cpu_merge, cpu_relocation)
    here = len(tf.config.list_physical_devices("GPU"))
    towers = list(range(here or 1) if gpus is None else range(gpus) if isinstance(gpus, int) else gpus)
    if here and max(towers, default=0) >= here:
        raise errors.ConfigError(f"multi_gpu_model(gpus={gpus}): this machine has {here} GPUs. Ask for as many.")
    merged = "/cpu:0" if cpu_merge or not here else f"/gpu:{towers[0]}"
    if len(towers) < 2:
        return model
    outputs = [[] for _ in model.outputs]
    for position, gpu in enumerate(towers):
        with tf.device(f"/gpu:{gpu}" if here else "/cpu:0"), tf.name_scope(f"replica_{gpu}"):
            rows = tf_keras.layers.Lambda(_rows, arguments={"position": position, "count": len(towers)})
            given = [rows(each) for each in model.inputs]
            for joined, output in zip(outputs, _listed(model(given if len(given) > 1 else given[0])), strict=True):
                joined.append(output)
    with tf.device(merged):
        joined = [
            tf_keras.layers.concatenate(parts, axis=0, name=name)
            for name, parts in zip(model.output_names, outputs, strict=True)
        ]
    return tf_keras.Model(model.inputs, joined)


def _listed(outputs) -> list:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _rows(batch: tf.Tensor, position: int, count: int) -> tf.Tensor:
    """Returns a tower's part of a batch, as equal as they can be."""
    size = tf.shape(batch)[0]
    return batch[size * position // count : size * (position + 1) // count]
