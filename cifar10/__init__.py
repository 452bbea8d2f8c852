"""The reference workload: CIFAR-10, or drawn images, with the network of TensorFlow's tutorial or a deeper one."""

import dataclasses
import functools

from cifar10 import augment, cifar10_94, convnet, crops, minigooglenet, resnet, shifts, source
from tower_train.data import augmentation
from tower_train.options import TRAINING, option
from tower_train.workload import Workload

_QUICK = dict(inference=None, augment=shifts.augment, test_time_augmentation=shifts.views, unsure=shifts.unsure)
# The models' differences from the fields below.
_MODELS = {
    "convnet": dict(inference=convnet.inference, augment=augment.augment, prepare=augment.prepare),
    "cifar10_94": _QUICK | dict(inference_for=cifar10_94.inference_for, recipe=cifar10_94.RECIPE),
    "cifar10_95": _QUICK
    | dict(
        inference_for=functools.partial(cifar10_94.inference_for, widths=cifar10_94.WIDTHS_95),
        recipe=cifar10_94.RECIPE_95,
    ),
    "minigooglenet": dict(inference=minigooglenet.inference, recipe=minigooglenet.RECIPE),
    "resnet20": dict(inference=resnet.resnet20, recipe=resnet.RECIPE),
    "resnet56": dict(inference=resnet.resnet56, recipe=resnet.RECIPE),
}


@dataclasses.dataclass(frozen=True)
class Cifar10Options(augmentation.ImageOptions):
    """This workload's own options."""

    model: str = option(
        "convnet", "the network, each with its own recipe: convnet (the tutorial's), cifar10_94 (to 94 % in 7.5 "
        "epochs), cifar10_95 (wider, to 95 % in 12), minigooglenet, resnet20, resnet56", TRAINING,
        allowed=tuple(_MODELS), resume="same",
    )  # fmt: skip


def workload(options: Cifar10Options) -> Workload:
    """Makes the workload under these options."""
    common = dict(
        name="cifar10",
        examples=source.examples,
        augment=crops.augment,
        prepare=crops.prepare,
        augments_on_devices=True,
        datasets=source.DATASETS,
        options=options,
        configure=workload,
        recipes={name: {"model": name} for name, model in _MODELS.items() if "recipe" in model},
    )
    fields = common | _MODELS[options.model]
    return Workload(**(fields | augmentation.functions(options, augment=fields["augment"])))


WORKLOAD = workload(Cifar10Options())
