"""Rivals: other ways to train the same network, for `python -m tower_train.benchmark`.

The benchmark looks for a module `rivals` beside the workload, and in it for `of(options)`: the rivals of the workload
under these options of its own.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

from tower_train import workload


@dataclasses.dataclass(frozen=True)
class Rival:
    """One other way to train a network.

    Attributes:
      name: its row in the table.
      num_devices: how many GPUs, or logical CPU devices, it trains on.
      forms: which forms of the benchmark have it: 'quick', 'full', 'growing'.
      dtype: of its convolutions and matrix products.
      train: (request, batch_size, after_step): trains on the examples of a `DataRequest`, batch_size of them a step
        over all devices, until `after_step(loss)`, called after every step, returns True.
      num_processes: how many call `train` together, each with its task in TF_CONFIG.
    """

    name: str
    num_devices: int
    forms: tuple[str, ...]
    train: Callable[[workload.DataRequest, int, Callable[[float], bool]], None]
    num_processes: int = 1
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Rivals:
    """The rivals of one network.

    Attributes:
      reference: the name of the one that ratios are taken to.
      rivals: all of them.
      plain_inference: images -> logits, the network without any trick, from which its arithmetic is counted; None if
        the workload's own network has none.
    """

    reference: str
    rivals: tuple[Rival, ...]
    plain_inference: Callable | None = None


def of(options) -> Rivals:
    """The rivals of a model: the published script trains the tutorial's only."""
    keras = (
        _keras("fit", options.model, 1, ("quick", "full")),
        _keras("MirroredStrategy 2", options.model, 2, ("quick", "full", "growing"), num_replicas=2),
        _keras("MirroredStrategy 4", options.model, 4, ("growing",), num_replicas=4),
        _keras("multi_gpu_model 1", options.model, 1, ("full",), num_towers=1),
        _keras("multi_gpu_model 2", options.model, 2, ("full",), num_towers=2),
    )
    if options.model == "cifar10_94":
        narrow = _keras("fit bfloat16", options.model, 1, ("quick", "full"), dtype_policy="mixed_bfloat16")
        narrow = dataclasses.replace(narrow, dtype="bfloat16")
        plain = _later("keras_networks", "cifar10_94")
        return Rivals("keras/fit", (*keras, narrow, *_of_torch()), lambda images: plain()(images))
    if options.model != "convnet":
        return Rivals("keras/fit", keras)
    port = (
        Rival("port", 1, ("quick", "full"), _later("port", num_towers=1)),
        Rival("port/2 towers", 2, ("full",), _later("port", num_towers=2)),
    )
    workers = Rival("keras/MultiWorkerMirroredStrategy 2", 1, ("growing",), _later("multi_worker"), num_processes=2)
    return Rivals("port", (*port, *keras, workers), _later("port", "inference"))


def _keras(name: str, model: str, num_devices: int, forms: tuple[str, ...], **options) -> Rival:
    return Rival(f"keras/{name}", num_devices, forms, _later("keras_fit", model=model, **options))


def _of_torch() -> tuple[Rival, ...]:
    """PyTorch is no dependency: its rivals are there if it is."""
    if not importlib.util.find_spec("torch"):
        return ()
    names = {"torch": "float32", "torch/bfloat16": "bfloat16"}
    return tuple(
        Rival(name, 1, ("quick", "full"), _later("torch_fit", dtype=dtype), dtype=dtype)
        for name, dtype in names.items()
    )


def _later(module: str, function: str = "train", **options) -> Callable:
    """A function of a module beside this one, with some of its arguments; the module is imported when it is called.

    Keras must not be imported in the port's process, which would pay for it in time and memory.
    """

    def call(*args):
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)(*args, **options)

    return call
