"""Other ways to train ResNet-50: Keras' `fit`, by itself and through multi_gpu_model; PyTorch's, of torchvision."""

import keras
import tensorflow as tf

import tower_train
from tower_train.bench import resnet50
from tower_train.bench.sides import Side, torch_sides
from tower_train.config import DeviceOptions
from tower_train.graph import devices

_FLOPS = 3 * 2 * 4_089_184_256  # of torchvision's: multiplications and additions of a forward pass, and twice backward


def of(options, on_gpu: bool = False) -> list[Side]:
    """Returns the sides."""
    del options
    sides = []
    for dtype in ("float32", "bfloat16"):
        forms = {"fit": {}, "fit/not compiled": {"jit_compile": False}, "multi_gpu_model": {"by_towers": True}}
        for form, arguments in forms.items():
            if form != "fit/not compiled" or on_gpu:
                label = f"Keras {form}".replace("/", ", ") if "fit" in form else "multi_gpu_model, 1 tower"
                sides.append(_keras(f"keras/{form}", label, dtype, **arguments))
    config = resnet50.WORKLOAD.config()
    recipe = dict(learning_rate=config.learning_rate, momentum=config.momentum, nesterov=False, label_smoothing=0.0)
    return sides + torch_sides("resnet50", recipe, on_gpu)


def _keras(name: str, label: str, dtype: str, **arguments) -> Side:
    if dtype != "float32":
        name, label, arguments = f"{name}/{dtype}", f"{label}, {dtype}", arguments | {"policy": f"mixed_{dtype}"}
    return Side(name, f"{__name__}:train", arguments, dtype=dtype, is_quick=name == "keras/fit", label=label)


def flops_per_example(options) -> int:
    """Returns the floating-point operations of a training example."""
    del options
    return _FLOPS


def train(request, batch_size, after_step, policy="float32", jit_compile="auto", by_towers=False) -> None:
    """Fits as `Side.train`."""
    del request
    devices.place(DeviceOptions())  # memory grows
    keras.config.set_dtype_policy(policy)
    model, recipe = resnet50.build(), resnet50.WORKLOAD.config()
    model = tower_train.multi_gpu_model(model, 1) if by_towers else model
    optimizer = keras.optimizers.SGD(recipe.learning_rate, recipe.momentum)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit_compile)
    batches = tf.data.Dataset.from_tensor_slices(resnet50.arrays()).shuffle(resnet50.COUNT).repeat()

    def end_step(batch, logs):
        model.stop_training = after_step(float(logs["loss"]))

    counted = keras.callbacks.LambdaCallback(on_train_batch_end=end_step)
    batches = batches.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    model.fit(batches, verbose=0, callbacks=[counted])
