"""multi_gpu_model: a Keras model that trains with one replica (tower) per device."""

import keras
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat, placement
from tower_train.fronts.keras_towers import exchange
from tower_train.fronts.keras_towers.model import TowerModel
from tower_train.graph.devices import HOST


def multi_gpu_model(
    model: keras.Model,
    gpus=None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
    batch_norm: str = "global",
    check_towers: str = "auto",
):
    """Makes a model that computes as `model`, with every batch split over several devices.

    The arguments are those of the `keras.utils.multi_gpu_model` that TensorFlow removed. All training is Keras' own, by
    `compile`, `fit` and their callbacks. It trains the weights of `model`, which is used and saved as usual.

        model = keras.applications.Xception(weights=None)
        parallel_model = tower_train.multi_gpu_model(model, gpus=8)
        parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
        parallel_model.fit(x, y, epochs=20, batch_size=256)  # the global batch: each GPU gets 32 examples
        model.save("my_model.keras")

    Where TF_CONFIG or Slurm's variables name several workers, this process joins them and all train one model; each
    computes its towers' part of the global batch.

    Args:
      model: the template. Its weights are spread over the towers' GPUs, unless it was built under
        tf.device("/cpu:0"). A `train_step` of its own runs in each tower as it is, and may say more to the towers
        (tower_train.steps).
      gpus: number of towers, or a list of the GPUs that carry them, or None for all GPUs. Without GPUs a count of
        towers lives on the CPU.
      cpu_merge: whether the outputs of several towers are joined on the CPU; if not, on the first tower's device.
      cpu_relocation: whether to move the template's weights to the CPU.
      batch_norm: global: batches are normalised over all towers, as on one device; tower: each tower's by itself.
      check_towers: auto: before its first step `fit` compares the towers with one device, as `check` does, on the
        first batch; it prints a line, and raises if they differ; never: it does not.

    Returns:
      A `TowerModel`.

    Raises:
      ConfigError: missing GPUs, or a model that cannot be split; several workers, one of which differs.
      RunError, WorkerError: as for tower_train.cluster.init.
    """
    _refuse(model)
    placement.check_choices("multi_gpu_model", batch_norm=batch_norm, check_towers=check_towers)
    placed = placement.place(gpus, "gpus")
    for variable in model.variables if cpu_relocation else ():
        compat.move(variable, HOST)
    workers, is_alone = exchange.find(), len(placed.towers) == 1
    merge_device = HOST if cpu_merge and not is_alone else placed.towers[0]
    for layer in compat.sublayers(model) if len(placed.towers) * workers.size > 1 else ():
        if getattr(layer, "stateful", False):
            raise errors.ConfigError(
                f"multi_gpu_model: {layer.name} has stateful=True, and a tower sees its part of a batch only. Leave "
                "that out, or train on one device: gpus=1."
            )
    return TowerModel(model, placed.towers, merge_device, workers, batch_norm, check_towers)


def _refuse(model) -> None:
    """Raises ConfigError for no model, and for one of another strategy."""
    if any(cls.__module__.startswith("tf_keras.") for cls in type(model).__mro__):
        raise errors.ConfigError(
            f"multi_gpu_model got a {type(model).__name__} of Keras 2 (tf_keras); it needs one of Keras 3. Build it by "
            "`import keras`, without TF_USE_LEGACY_KERAS=1, or train it by tower_train.estimator.model_to_estimator."
        )
    if not isinstance(model, keras.Model):
        raise errors.ConfigError(f"multi_gpu_model got a {type(model).__name__}; it needs a keras.Model.")
    if isinstance(model, TowerModel):
        raise errors.ConfigError("multi_gpu_model got a model that it made. Give it that model's `template`.")
    if tf.distribute.has_strategy():
        raise errors.ConfigError(
            "multi_gpu_model was called in a tf.distribute strategy's scope. Use one of the two: leave the scope."
        )
