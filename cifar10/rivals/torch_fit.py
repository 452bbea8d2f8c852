"""The network of cifar10.cifar10_94 in PyTorch, trained as usual there: eager, channels last, bfloat16 by autocast.

On images in memory, augmented at random batch by batch, with smooth labels and weight decay as in the recipe; by SGD at
the rate and momentum that filters have there, without Muon and rates of single variables.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import torch
from torch import nn
from torch.nn import functional

from cifar10 import cifar10_94, crops, records, shifts, source, whitening
from tower_train import workload

OURS = cifar10_94.NETWORKS["cifar10_94"]


def train(
    request: workload.DataRequest, batch_size: int, after_step: Callable[[float], bool], autocast: bool = False,
) -> None:  # fmt: skip
    """Trains as `Side.train`, on the GPU if TensorFlow sees one. autocast: to bfloat16."""
    # PyTorch's compiler, which eager training imports and does not use, crashes in a process with TensorFlow.
    sys.modules.setdefault("triton", None)
    device = torch.device("cuda" if tf.config.list_physical_devices("GPU") else "cpu")
    data = records.read_split(source.locate(request)[0], "train")
    network = Network(whitening.kernels(data.images[: cifar10_94.WHITENED_IMAGES]))
    network = network.to(device, memory_format=torch.channels_last)
    recipe = cifar10_94.RECIPE
    optimizer = torch.optim.SGD(network.groups(), recipe["learning_rate"], recipe["momentum"], nesterov=True)
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=recipe["label_smoothing"])
    for images, labels in augmented_batches(data, batch_size, device):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = network(images)
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        if after_step(loss.item()):
            return


class Network(nn.Module):
    """float32 images [batch, 3, 32, 32] to logits [batch, 10]; the kernels are `whitening.kernels`."""

    def __init__(self, whitening_kernels: np.ndarray):
        super().__init__()
        self.whitening = nn.Conv2d(3, whitening.NUM_KERNELS, whitening.SIZE)
        self.convolutions, self.normalizations = nn.ModuleList(), nn.ModuleList()
        channels = whitening.NUM_KERNELS
        for width in OURS["widths"]:
            for _ in range(2):
                self.convolutions.append(nn.Conv2d(channels, width, 3, padding="same", bias=False))
                self.normalizations.append(nn.BatchNorm2d(width, momentum=1 - cifar10_94.MOVING_MOMENTUM))
                channels = width
        self.head = nn.Linear(channels, 10, bias=False)
        with torch.no_grad():
            self.whitening.weight.copy_(torch.from_numpy(whitening_kernels).permute(3, 2, 0, 1))
            self.whitening.bias.zero_()
        self.whitening.weight.requires_grad = False
        for normalization in self.normalizations:
            normalization.weight.requires_grad = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = functional.silu(1.702 * self.whitening(images))  # GELU's sigmoid approximation, but for a factor
        for i, (convolution, normalization) in enumerate(zip(self.convolutions, self.normalizations, strict=True)):
            maps = convolution(maps)
            if i % 2 == 0:
                maps = functional.max_pool2d(maps, 2)
            maps = functional.silu(normalization(maps))
        return self.head(functional.max_pool2d(maps, 3).flatten(1)) * cifar10_94.LOGIT_SCALE

    def groups(self) -> list[dict]:
        """Trained parameters with their weight decay, for an optimizer."""
        biases = [self.whitening.bias, *(normalization.bias for normalization in self.normalizations)]
        return [
            {"params": [convolution.weight for convolution in self.convolutions]},
            {"params": biases, "weight_decay": cifar10_94.DECAY / cifar10_94.BIAS_RATE},
            {
                "params": [self.head.weight],
                "weight_decay": cifar10_94.DECAY / cifar10_94.head_rate(OURS["widths"][-1], OURS["head"]),
            },
        ]


def augmented_batches(
    data: records.Records, batch_size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields endless (float32 images [batch, 3, 32, 32], channels last, int64 labels [batch]), shuffled each epoch."""
    images, labels = torch.from_numpy(data.images).to(device), torch.from_numpy(data.labels).long().to(device)
    order = torch.empty(0, dtype=torch.int64, device=device)
    while True:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(labels), device=device)])
        chosen, order = order[:batch_size], order[batch_size:]
        yield augmented(images[chosen]), labels[chosen]


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Does what `shifts.augment` does, but flips at random.

    From uint8 [batch, 32, 32, 3] to float32 [batch, 3, 32, 32], channels last.
    """
    device, size = images.device, images.shape[1]

    def places():  # int64 [batch, size]: the source of each row or column
        shift = torch.randint(-shifts.MOST, shifts.MOST + 1, [len(images), 1], device=device)
        beyond = (torch.arange(size, device=device) + shift).abs()
        return torch.where(beyond < size, beyond, 2 * (size - 1) - beyond)

    rows, columns = places(), places()
    columns = torch.where(torch.rand([len(images), 1], device=device) < 0.5, columns.flip(1), columns)
    batch = torch.arange(len(images), device=device)[:, None, None]
    shifted = images[batch, rows[:, :, None], columns[:, None, :]].float()
    mean, deviation = (torch.from_numpy(values).to(device) for values in (crops.MEAN, crops.DEVIATION))
    brightness, contrast = 2 * torch.rand([2, len(images), 1, 1, 1], device=device) - 1
    brighter = (shifted - mean) / deviation + shifts.BRIGHTNESS * brightness
    return (brighter * (1 + shifts.CONTRAST * contrast)).permute(0, 3, 1, 2)
