"""The reference workload: CIFAR-10, or drawn images, with the network of TensorFlow's tutorial or a deeper one."""

import dataclasses
import functools
import math

from cifar10 import augment, cifar10_94, convnet, crops, minigooglenet, resnet, shifts, source
from tower_train import errors
from tower_train.data import augmentation
from tower_train.options import TRAINING, option
from tower_train.workload import Workload

_OF_ANY_SIZE = tuple(cifar10_94.IMAGE_SIZES)  # models


def _quick(name: str, augment=shifts.augment) -> dict:
    """Returns the fields of one of cifar10_94's models."""
    return dict(
        inference=None,
        inference_for=functools.partial(cifar10_94.inference_for, **cifar10_94.NETWORKS[name]),
        augment=augment,
        test_time_augmentation=shifts.views,
        unsure=shifts.unsure,
        recipe=cifar10_94.RECIPES[name],
    )


# Each model's fields, over those in `workload`.
_MODELS = {
    "convnet": dict(inference=convnet.inference, augment=augment.augment, prepare=augment.prepare),
    "cifar10_94": _quick("cifar10_94"),
    "cifar10_95": _quick("cifar10_95"),
    "cifar10_96": _quick("cifar10_96", augment=shifts.augment_with_cutout),
    "minigooglenet": dict(inference=minigooglenet.inference, recipe=minigooglenet.RECIPE),
    "resnet20": dict(inference=resnet.resnet20, recipe=resnet.RECIPE),
    "resnet56": dict(inference=resnet.resnet56, recipe=resnet.RECIPE),
}


@dataclasses.dataclass(frozen=True)
class Cifar10Options(augmentation.ImageOptions):
    """This workload's own options."""

    model: str = option(
        "convnet",
        "the network, each with its own recipe: convnet (the tutorial's), cifar10_94 (to 94 % in 8 "
        "epochs), cifar10_95 (wider, to 95 % in 16), cifar10_96 (deeper, to 96 % in 38), minigooglenet, resnet20, "
        "resnet56",
        TRAINING,
        allowed=tuple(_MODELS),
        resume="same",
    )
    image_sizes: str | None = option(
        None,
        "EPOCH:PIXELS,...: height and width of training images from an epoch on, e.g. 0:24,4.5:32 (the "
        "recipe's with --recipe, else 32)",
        TRAINING,
        resume="note",
        needs=("model", *_OF_ANY_SIZE),
    )

    def check(self):
        self.sizes()

    def sizes(self) -> dict[float, int]:
        """Returns {epochs seen: pixels from then on}; ConfigError if --image_sizes cannot be read."""
        if self.image_sizes is None:
            return cifar10_94.FULL_SIZE
        try:
            parts = (part.split(":") for part in self.image_sizes.split(","))
            listed = [(float(epoch), int(pixels)) for epoch, pixels in parts]
        except ValueError:
            listed = []
        least, sizes = cifar10_94.LEAST_SIZE, dict(listed)
        from_start = 0 in sizes and all(0 <= epoch < math.inf for epoch in sizes) and len(sizes) == len(listed)
        if not from_start or not all(least <= size <= crops.SIZE for size in sizes.values()):
            raise errors.ConfigError(
                f"--image_sizes={self.image_sizes}: it must be EPOCH:PIXELS,..., from epoch 0 on, {least} to "
                f"{crops.SIZE} pixels, such as 0:24,4.5:32."
            )
        return sizes


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
        recipes={
            name: {"model": name} | ({"image_sizes": cifar10_94.IMAGE_SIZES[name]} if name in _OF_ANY_SIZE else {})
            for name, model in _MODELS.items()
            if "recipe" in model
        },
    )
    fields = common | _MODELS[options.model]
    if options.model in _OF_ANY_SIZE:
        fields["inference_for"] = functools.partial(fields["inference_for"], sizes=options.sizes())
    return Workload(**(fields | augmentation.functions(options, augment=fields["augment"])))


WORKLOAD = workload(Cifar10Options())
