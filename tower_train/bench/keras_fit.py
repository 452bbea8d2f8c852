"""Keras' `fit`, the choice of most users, as a side: by itself, under MirroredStrategy, or by multi_gpu_model."""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

import tower_train
from tower_train.config import DeviceOptions
from tower_train.graph import devices


def fit(
    make_model: Callable[[], tuple[keras.Model, dict]],
    make_batches: Callable[[], tf.data.Dataset],
    after_step: Callable[[float], bool],
    form: str = "fit",
    dtype_policy: str = "float32",
    jit_compile: bool | str = "auto",
) -> None:
    """Fits a model until `after_step` returns True; the loss that it gets is Keras', the mean of the losses so far.

    Args:
      make_model: returns the model, and the optimizer and the loss for its `compile`.
      make_batches: returns endless batches.
      form: fit, MirroredStrategy (with two replicas, on as many GPUs or logical CPUs), or multi_gpu_model.
      dtype_policy: of Keras, such as 'mixed_bfloat16'.
      jit_compile: as Keras' `compile` takes it: 'auto' compiles by XLA on a GPU.
    """
    num_replicas = 2 if form == "MirroredStrategy" else 1
    places = devices.place(DeviceOptions(num_gpus=num_replicas)).towers  # whose memory grows
    keras.config.set_dtype_policy(dtype_policy)
    strategy = contextlib.nullcontext()
    if num_replicas > 1:
        if places[0].startswith("/cpu"):
            parts = [tf.config.LogicalDeviceConfiguration()] * num_replicas
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        strategy = tf.distribute.MirroredStrategy(list(places)).scope()
    with strategy:
        model, compiled = make_model()
        model = tower_train.multi_gpu_model(model, 1, check_towers="never") if form == "multi_gpu_model" else model
        model.compile(**compiled, jit_compile=jit_compile)

    def end_step(batch, logs):
        model.stop_training = after_step(float(logs["loss"]))

    model.fit(make_batches(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end_step)])
