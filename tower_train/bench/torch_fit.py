"""Networks of this workload, and ResNet-50, in PyTorch, trained as usual there: channels last, bfloat16 by autocast.

Images lie in the device's memory and are augmented at random batch by batch, with smooth labels and weight decay as in
the recipe; by SGD at the recipe's rate and momentum, without Muon and rates of single variables. Run as a file in a
process without TensorFlow, beside which PyTorch's compiler crashes: nothing of this project is imported here.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def train(
    request: dict,
    batch_size: int,
    after_step: Callable[[float], bool],
    network: str,
    recipe: dict,
    autocast: bool = False,
    compiled: bool = False,
) -> None:
    """Trains one of NETWORKS with these numbers as `Side.train`, on the GPU if there is one; in bfloat16 if autocast,
    and by torch.compile if compiled. The request is the keyword arguments of a DataRequest."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # as TensorFlow's setting: factors of 10 bits
    data = {name: torch.from_numpy(array) for name, array in read(request, network).items()}
    module = NETWORKS[network](recipe, data).to(place, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        module.groups(), recipe["learning_rate"], recipe["momentum"], nesterov=recipe["nesterov"]
    )
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=recipe["label_smoothing"])
    forward = torch.compile(module) if compiled else module
    images, labels = data["images"].to(place), data["labels"].long().to(place)
    for chosen in orders(len(labels), batch_size, place):
        optimizer.zero_grad()
        with torch.autocast(place.type, torch.bfloat16, enabled=autocast):
            logits = forward(module.augmented(images[chosen]))
        loss = cross_entropy(logits.float(), labels[chosen])
        loss.backward()
        optimizer.step()
        if after_step(loss.item()):
            return


def read(request: dict, network: str) -> dict[str, np.ndarray]:
    """Returns images, uint8 [n, height, width, 3], labels, whitening kernels; a process with TensorFlow reads them."""
    if network == "resnet50":
        rng = np.random.default_rng(0)
        return {"images": rng.integers(0, 256, [1024, 224, 224, 3], np.uint8), "labels": rng.integers(0, 1000, 1024)}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{value or ''}" for value in (request["dataset"], request["data_dir"], f"{folder}/data.npz")]
        subprocess.run([sys.executable, "-m", "cifar10.rivals.for_torch", *words], check=True)
        with np.load(f"{folder}/data.npz") as data:
            return dict(data)


def orders(count: int, batch_size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields endless indices of examples [batch], shuffled each epoch."""
    order = torch.empty(0, dtype=torch.int64, device=device)
    while True:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(count, device=device)])
        chosen, order = order[:batch_size], order[batch_size:]
        yield chosen


class Convnet(nn.Module):
    """The network of cifar10.convnet: float32 images [batch, 3, 24, 24] to logits."""

    def __init__(self, recipe: dict, data: dict):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 5, padding=2), nn.Conv2d(64, 64, 5, padding=2)
        self.local3, self.local4, self.softmax_linear = nn.Linear(2304, 384), nn.Linear(384, 192), nn.Linear(192, 10)
        self.norm, self.decay = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0), recipe["weight_decay"]
        for layer, deviation, bias in (
            (self.conv1, 5e-2, 0.0),
            (self.conv2, 5e-2, 0.1),
            (self.local3, 0.04, 0.1),
            (self.local4, 0.04, 0.1),
            (self.softmax_linear, 1 / 192, 0.0),
        ):
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.constant_(layer.bias, bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.norm(_pool(functional.relu(self.conv1(images))))
        maps = _pool(self.norm(functional.relu(self.conv2(maps))))
        maps = functional.relu(self.local3(maps.permute(0, 2, 3, 1).flatten(1)))
        return self.softmax_linear(functional.relu(self.local4(maps)))

    def groups(self) -> list[dict]:
        decayed = [self.local3.weight, self.local4.weight]
        others = [each for each in self.parameters() if all(each is not other for other in decayed)]
        return [{"params": others}, {"params": decayed, "weight_decay": self.decay}]

    @staticmethod
    def augmented(images: torch.Tensor) -> torch.Tensor:
        """Crops, flips, changes contrast and standardises: uint8 [batch, 32, 32, 3] to float32 [batch, 3, 24, 24]."""
        device, size, most = images.device, 24, 9
        places = torch.arange(size, device=device) + torch.randint(0, most, [2, len(images), 1], device=device)
        rows, columns = places[0], _flipped_half(places[1])
        crops = images[_batch(images), rows[:, :, None], columns[:, None, :]].float()
        mean = crops.mean([1, 2], keepdim=True)
        crops = (crops - mean) * torch.empty([len(images), 1, 1, 1], device=device).uniform_(0.2, 1.8) + mean
        mean, deviation = crops.mean([1, 2, 3], keepdim=True), crops.std([1, 2, 3], unbiased=False, keepdim=True)
        return ((crops - mean) / deviation.clamp(min=(size * size * 3) ** -0.5)).permute(0, 3, 1, 2)


class Cifar10_94(nn.Module):
    """The network of cifar10.cifar10_94: float32 images [batch, 3, 32, 32] to logits."""

    def __init__(self, recipe: dict, data: dict):
        super().__init__()
        self.recipe = recipe
        self.whitening = nn.Conv2d(3, data["whitening"].shape[-1], 2)
        self.convolutions, self.normalizations = nn.ModuleList(), nn.ModuleList()
        channels = self.whitening.out_channels
        for width in recipe["widths"]:
            for _ in range(2):
                self.convolutions.append(nn.Conv2d(channels, width, 3, padding="same", bias=False))
                self.normalizations.append(nn.BatchNorm2d(width, momentum=1 - recipe["moving_momentum"]))
                channels = width
        self.head = nn.Linear(channels, 10, bias=False)
        with torch.no_grad():
            self.whitening.weight.copy_(data["whitening"].permute(3, 2, 0, 1))
            self.whitening.bias.zero_()
        self.whitening.weight.requires_grad = False
        for normalization in self.normalizations:
            normalization.weight.requires_grad = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = functional.silu(1.702 * self.whitening(images))  # GELU's sigmoid approximation, up to a factor
        for i, (convolution, normalization) in enumerate(zip(self.convolutions, self.normalizations, strict=True)):
            maps = convolution(maps)
            if i % 2 == 0:
                maps = functional.max_pool2d(maps, 2)
            maps = functional.silu(normalization(maps))
        return self.head(functional.max_pool2d(maps, 3).flatten(1)) * self.recipe["logit_scale"]

    def groups(self) -> list[dict]:
        biases = [self.whitening.bias, *(normalization.bias for normalization in self.normalizations)]
        return [
            {"params": [convolution.weight for convolution in self.convolutions]},
            {"params": biases, "weight_decay": self.recipe["bias_decay"]},
            {"params": [self.head.weight], "weight_decay": self.recipe["head_decay"]},
        ]

    def augmented(self, images: torch.Tensor) -> torch.Tensor:
        """Does what `shifts.augment` does, but flips at random.

        From uint8 [batch, 32, 32, 3] to float32 [batch, 3, 32, 32], channels last.
        """
        device, size, most = images.device, images.shape[1], self.recipe["most"]

        def places():  # int64 [batch, size]: the source of each row or column
            shift = torch.randint(-most, most + 1, [len(images), 1], device=device)
            beyond = (torch.arange(size, device=device) + shift).abs()
            return torch.where(beyond < size, beyond, 2 * (size - 1) - beyond)

        rows, columns = places(), _flipped_half(places())
        shifted = images[_batch(images), rows[:, :, None], columns[:, None, :]].float()
        mean, deviation = (torch.tensor(self.recipe[name], device=device) for name in ("mean", "deviation"))
        brightness, contrast = 2 * torch.rand([2, len(images), 1, 1, 1], device=device) - 1
        brighter = (shifted - mean) / deviation + self.recipe["brightness"] * brightness
        return (brighter * (1 + self.recipe["contrast"] * contrast)).permute(0, 3, 1, 2)


class ResNet50(nn.Module):
    """torchvision's ResNet-50: images [batch, 3, 224, 224] to logits [batch, 1000]."""

    def __init__(self, recipe: dict, data: dict):
        super().__init__()
        import torchvision

        self.network = torchvision.models.resnet50()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def groups(self) -> list[dict]:
        return [{"params": list(self.parameters())}]

    @staticmethod
    def augmented(images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 127.5 - 1).permute(0, 3, 1, 2)


NETWORKS = {"convnet": Convnet, "cifar10_94": Cifar10_94, "resnet50": ResNet50}


def _pool(maps: torch.Tensor) -> torch.Tensor:
    """Pools as TensorFlow's SAME: a row and a column are added at the end."""
    return functional.max_pool2d(functional.pad(maps, (0, 1, 0, 1), value=-torch.inf), 3, 2)


def _flipped_half(columns: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.rand([len(columns), 1], device=columns.device) < 0.5, columns.flip(1), columns)


def _batch(images: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(images), device=images.device)[:, None, None]
