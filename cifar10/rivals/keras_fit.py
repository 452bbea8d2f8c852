"""The same network as a Keras model trained by `fit`, the choice of most users.

By itself, under MirroredStrategy, or through tower_train.multi_gpu_model.

Shows Keras at its best: images in memory, augmented in whole batches by a parallel `map` and prefetched; a compiled
step, by XLA on a GPU, as Keras does by default; no progress bar and no callback but the one that counts
steps. It trains as tower_train does: on images augmented by the same function, with weight decay, and SGD, moving
averages and label smoothing by the same recipe; at its initial learning rate, without Muon, which would cost time, and
without rates of single variables, for which Keras has no option.
"""

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import cifar10
import tower_train
from cifar10 import cifar10_94, records, source, whitening
from cifar10.rivals import keras_networks
from tower_train import config, workload
from tower_train.graph import devices
from tower_train.options import rules


def train(
    request: workload.DataRequest,
    batch_size: int,
    after_step: Callable[[float], bool],
    model: str = "convnet",
    num_replicas: int = 1,
    dtype_policy: str = "float32",
    jit_compile: bool | str = "auto",
    by_towers: bool = False,
) -> None:
    """Fits as `Side.train`; the loss is Keras', the mean of the losses so far.

    Args:
      model: name of one of the workload's networks.
      num_replicas: more than one train under MirroredStrategy, on as many GPUs, or without GPUs on logical CPUs.
      dtype_policy: of Keras, such as 'mixed_bfloat16'.
      jit_compile: as Keras' `compile` takes it: 'auto' compiles by XLA on a GPU.
      by_towers: by multi_gpu_model, with a tower a replica.
    """
    ours = cifar10.WORKLOAD.with_options({"model": model})
    recipe = ours.config()
    placed = devices.place(config.DeviceOptions(num_gpus=num_replicas))
    is_mirrored = num_replicas > 1 and not by_towers
    strategy = tf.distribute.MirroredStrategy(_with_cpus(placed.towers)) if is_mirrored else None
    keras.config.set_dtype_policy(dtype_policy)
    with strategy.scope() if strategy else contextlib.nullcontext():
        trained = keras_networks.NETWORKS[model]()
        if any(layer.name == keras_networks.WHITENING for layer in trained.layers):
            first = records.read_split(source.locate(request)[0], "train").images[: cifar10_94.WHITENED_IMAGES]
            trained.get_layer(keras_networks.WHITENING).kernel.assign(whitening.kernels(first))
        trained = tower_train.multi_gpu_model(trained, num_replicas, check_towers="never") if by_towers else trained
        trained.compile(
            optimizer(recipe),
            keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=recipe.label_smoothing),
            jit_compile=jit_compile,
        )
    batches = augmented_images(request, batch_size, ours.augment)
    batches = batches.map(lambda images, labels: (images, tf.one_hot(labels, records.NUM_CLASSES)))

    def end_step(batch, logs):
        trained.stop_training = after_step(float(logs["loss"]))

    trained.fit(batches, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end_step)])


def optimizer(recipe: tower_train.Config) -> keras.optimizers.SGD:
    """Makes the SGD of a model's recipe."""
    start = rules.parse_points(recipe.lr_points)[0][1] if recipe.lr_points else 1.0
    return keras.optimizers.SGD(
        start * recipe.learning_rate,
        momentum=recipe.momentum if recipe.optimizer in ("momentum", "muon") else 0.0,
        nesterov=recipe.nesterov,
        use_ema=recipe.ema > 0,
        ema_momentum=recipe.ema,
    )


def augmented_images(request: workload.DataRequest, batch_size: int, augmentation: Callable) -> tf.data.Dataset:
    """Makes endless batches of (float32 images [batch, size, size, 3], int32 labels [batch])."""
    data = records.read_split(source.locate(request)[0], "train")

    def augmented(images, labels):
        return augmentation(images, _Draws(batch_size)), labels

    images = tf.data.Dataset.from_tensor_slices((data.images, data.labels))
    batches = images.shuffle(len(data.labels)).repeat().batch(batch_size, drop_remainder=True)
    return batches.map(augmented, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


class _Draws:
    """A `workload.Draws` without positions: new numbers at every call, as is usual with Keras."""

    def __init__(self, batch: int):
        self._batch = batch
        self.epochs = tf.zeros([batch], tf.int64)

    def uniform(self, name: str, count: int) -> tf.Tensor:
        del name
        return tf.random.uniform([self._batch, count])

    per_example = uniform


def _with_cpus(places: Sequence[str]) -> list[str]:
    """Returns the devices, after making a logical CPU device for each that is one."""
    if places[0].startswith("/cpu"):
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(places))
    return list(places)
