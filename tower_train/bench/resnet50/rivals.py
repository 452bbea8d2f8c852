"""Other ways to train ResNet-50: Keras' `fit`, by itself and through multi_gpu_model; PyTorch's, of torchvision."""

import keras
import tensorflow as tf

from tower_train.bench import keras_fit, resnet50
from tower_train.bench.sides import Side, keras_sides, torch_sides


def of(options, on_gpu: bool = False) -> list[Side]:
    """Returns the sides."""
    del options
    config = resnet50.WORKLOAD.config()
    recipe = dict(learning_rate=config.learning_rate, momentum=config.momentum, nesterov=False, label_smoothing=0.0)
    return keras_sides(f"{__name__}:train", on_gpu) + torch_sides("resnet50", recipe, on_gpu)


def train(request, batch_size, after_step, **how) -> None:
    """Fits as `Side.train`; `how` are arguments of keras_fit.fit."""
    del request

    def make_model():
        recipe, loss = resnet50.WORKLOAD.config(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return resnet50.build(), {
            "optimizer": keras.optimizers.SGD(recipe.learning_rate, recipe.momentum),
            "loss": loss,
        }

    def make_batches():
        examples = tf.data.Dataset.from_tensor_slices(resnet50.arrays()).shuffle(resnet50.COUNT).repeat()
        return examples.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    keras_fit.fit(make_model, make_batches, after_step, **how)
