"""What a user could train the same network with instead, for `python -m tower_train.benchmark`.

The benchmark looks for a module `rivals` beside the workload, and in it for `of(options)`: the rivals of the workload
under these options of its own.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

from tower_train import workload


@dataclasses.dataclass(frozen=True)
class Rival:
    """One of them.

    Attributes:
      name: its row in the table.
      num_devices: how many GPUs, or logical CPU devices, it trains on.
      forms: which forms of the benchmark have it: 'quick', 'full', 'growing'.
      dtype: of its convolutions and matrix products.
      train: (request, batch_size, after_step): trains on the examples of a `DataRequest`, batch_size of them a step
        over all devices, until `after_step(loss)`, called after every step, returns True.
      num_processes: how many call `train` together, each of them with its place in TF_CONFIG.
    """

    name: str
    num_devices: int
    forms: tuple[str, ...]
    train: Callable[[workload.DataRequest, int, Callable[[float], bool]], None]
    num_processes: int = 1
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Rivals:
    """Those of one network.

    Attributes:
      reference: the name of the one that ratios are taken to.
      rivals: all of them.
      plain_inference: images -> logits, the network without any trick, what its arithmetic is counted from; None where
        the workload's own network has none.
    """

    reference: str
    rivals: tuple[Rival, ...]
    plain_inference: Callable | None = None


# Loaded when run: Keras must not have been imported where the port is, which would pay for it in time and memory.
def _port(request, batch_size, after_step, num_towers):
    from cifar10.rivals import port

    port.train(request, batch_size, after_step, num_towers)


def _keras(request, batch_size, after_step, **options):
    from cifar10.rivals import keras_fit

    keras_fit.train(request, batch_size, after_step, **options)


def _torch(request, batch_size, after_step, dtype):
    from cifar10.rivals import torch_fit

    torch_fit.train(request, batch_size, after_step, dtype)


def _multi_worker(request, batch_size, after_step):
    from cifar10.rivals import multi_worker

    multi_worker.train(request, batch_size, after_step)


def _plain_inference(images):
    from cifar10.rivals import port

    return port.inference(images)


def _plain_cifar10_94(images):
    from cifar10.rivals import keras_networks

    return keras_networks.cifar10_94()(images)


def of(options) -> Rivals:
    """The rivals of a model: the published script trains the tutorial's only."""
    fit = functools.partial(_keras, model=options.model)
    keras = (
        Rival("keras/fit", 1, ("quick", "full"), fit),
        Rival("keras/MirroredStrategy 2", 2, ("quick", "full", "growing"), functools.partial(fit, num_replicas=2)),
        Rival("keras/MirroredStrategy 4", 4, ("growing",), functools.partial(fit, num_replicas=4)),
        Rival("keras/multi_gpu_model 1", 1, ("full",), functools.partial(fit, num_towers=1)),
        Rival("keras/multi_gpu_model 2", 2, ("full",), functools.partial(fit, num_towers=2)),
    )
    if options.model == "cifar10_94":
        in_bfloat16 = functools.partial(fit, dtype_policy="mixed_bfloat16")
        narrow = Rival("keras/fit bfloat16", 1, ("quick", "full"), in_bfloat16, dtype="bfloat16")
        return Rivals("keras/fit", (*keras, narrow, *_of_torch()), _plain_cifar10_94)
    if options.model != "convnet":
        return Rivals("keras/fit", keras)
    port = (
        Rival("port", 1, ("quick", "full"), functools.partial(_port, num_towers=1)),
        Rival("port/2 towers", 2, ("full",), functools.partial(_port, num_towers=2)),
    )
    several = Rival("keras/MultiWorkerMirroredStrategy 2", 1, ("growing",), _multi_worker, num_processes=2)
    return Rivals("port", (*port, *keras, several), _plain_inference)
    return Rivals("port", port + keras, _plain_inference)


def _of_torch() -> tuple[Rival, ...]:
    """PyTorch is no dependency: its rivals are there where it is."""
    if not importlib.util.find_spec("torch"):
        return ()
    return (
        Rival("torch", 1, ("quick", "full"), functools.partial(_torch, dtype="float32")),
        Rival("torch/bfloat16", 1, ("quick", "full"), functools.partial(_torch, dtype="bfloat16"), dtype="bfloat16"),
    )
