"""Rivals: other ways to train the same networks, for `python -m tower_train.benchmark`.

The benchmark looks for a module `rivals` beside the workload, and in it for `of(options)`, the rivals of the workload
under these options of its own. Ratios are taken to the first rival.
"""

import cifar10
from cifar10 import cifar10_94, convnet, crops, shifts
from tower_train.bench.sides import Side, keras_sides, torch_sides


def of(options, on_gpu: bool = False) -> list[Side]:
    """Returns the rivals of a model: Keras for the tutorial's network and those of cifar10_94; for these two PyTorch
    too, and for the tutorial's the published script; none for others."""
    if options.model != "convnet" and options.model not in cifar10_94.NETWORKS:
        return []
    train, two = f"{__name__}.keras_fit:train", dict(model=options.model, form="MirroredStrategy")
    sides = [Side("keras/MirroredStrategy 2", train, two, 2, is_quick=True, label="Keras MirroredStrategy, 2 replicas")]
    dtypes = ("float32",) if options.model == "convnet" else ("float32", "bfloat16")
    sides += keras_sides(train, on_gpu, dtypes, model=options.model)
    if options.model in ("convnet", "cifar10_94"):
        sides += torch_sides(options.model, for_torch(options.model), on_gpu)
    if options.model == "convnet":
        port, label = "cifar10.multi_gpu_train:train", "Published script, ported"
        return [
            Side("port", port, is_quick=True, label=label),
            Side("port/2 towers", port, {"num_gpus": 2}, 2, label=f"{label}, 2 towers"),
            *sides,
        ]
    return sides


def for_torch(model: str) -> dict:
    """Returns the numbers of a model's recipe that torch_fit takes."""
    config = cifar10.WORKLOAD.with_options({"model": model}).config()
    recipe = {
        "learning_rate": config.learning_rate,
        "label_smoothing": config.label_smoothing,
        "momentum": config.momentum if config.optimizer != "sgd" else 0.0,
        "nesterov": config.nesterov,
        "weight_decay": convnet.WEIGHT_DECAY,
    }
    if model == "cifar10_94":
        ours = cifar10_94.NETWORKS[model]
        recipe |= {
            "widths": ours["widths"],
            "moving_momentum": cifar10_94.MOVING_MOMENTUM,
            "logit_scale": cifar10_94.LOGIT_SCALE,
            "bias_decay": cifar10_94.DECAY / cifar10_94.BIAS_RATE,
            "head_decay": cifar10_94.DECAY / cifar10_94.head_rate(ours["widths"][-1], ours["head"]),
            "most": shifts.MOST,
            "brightness": shifts.BRIGHTNESS,
            "contrast": shifts.CONTRAST,
            "mean": crops.MEAN.tolist(),
            "deviation": crops.DEVIATION.tolist(),
        }
    return recipe
