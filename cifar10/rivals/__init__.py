"""Rivals: other ways to train the same network, for `python -m tower_train.benchmark`.

The benchmark looks for a module `rivals` beside the workload, and in it for `of(options)`: the rivals of the workload
under these options of its own. Ratios are taken to the first of them.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

from tower_train import workload


@dataclasses.dataclass(frozen=True)
class Rival:
    """Another way to train a network.

    Attributes:
      name: its name for --systems.
      num_devices: number of GPUs, or logical CPU devices, on which it trains.
      forms: the forms of the benchmark that have it: 'quick', 'full', 'growing'.
      dtype: of its convolutions and matrix products.
      train: (request, batch_size, after_step): trains on the examples of a `DataRequest`, batch_size per step over all
        devices, until `after_step(loss)`, called after every step, returns True.
      num_processes: number of processes that call `train` together, each with its task in TF_CONFIG.
      plain_inference: of the first, if the workload's own network has tricks: images -> logits without any, to count
        its arithmetic.
      label: its name in tables and figures; empty if that is `name`. It ends with ', DTYPE' if that is not float32.
    """

    name: str
    num_devices: int
    forms: tuple[str, ...]
    train: Callable[[workload.DataRequest, int, Callable[[float], bool]], None]
    num_processes: int = 1
    dtype: str = "float32"
    plain_inference: Callable | None = None
    label: str = ""


def of(options) -> list[Rival]:
    """Returns the rivals of a model: the published script for the tutorial's only, PyTorch's if it is installed."""

    def keras(name, label, num_devices, forms, **arguments) -> Rival:
        train = _later("keras_fit", model=options.model, **arguments)
        return Rival(f"keras/{name}", num_devices, forms, train, label=label)

    both = "quick", "full"
    found = [
        keras("fit", "Keras fit", 1, both),
        keras("MirroredStrategy 2", "Keras MirroredStrategy, 2 replicas", 2, (*both, "growing"), num_replicas=2),
        keras("MirroredStrategy 4", "Keras MirroredStrategy, 4 replicas", 4, ("growing",), num_replicas=4),
        keras("multi_gpu_model 1", "Keras, our multi_gpu_model, 1 tower", 1, ("full",), num_towers=1),
        keras("multi_gpu_model 2", "Keras, our multi_gpu_model, 2 towers", 2, ("full",), num_towers=2),
    ]
    if options.model == "convnet":
        port = Rival("port", 1, both, _later("port"), plain_inference=_later("port", "inference"),
                     label="Published script, ported")  # fmt: skip
        two_towers = Rival("port/2 towers", 2, ("full",), _later("port", num_towers=2),
                           label="Published script, ported, 2 towers")  # fmt: skip
        workers = Rival("keras/MultiWorkerMirroredStrategy 2", 1, ("growing",), _later("multi_worker"), num_processes=2,
                        label="Keras MultiWorkerMirroredStrategy, 2 workers")  # fmt: skip
        return [port, two_towers, *found, workers]
    if options.model in ("cifar10_94", "cifar10_95"):
        apply = _later("keras_networks", "apply")
        found[0] = dataclasses.replace(found[0], plain_inference=lambda images: apply(options.model, images))
        narrow = keras("fit bfloat16", "Keras fit, bfloat16", 1, both, dtype_policy="mixed_bfloat16")
        found.append(dataclasses.replace(narrow, dtype="bfloat16"))
        if options.model == "cifar10_94" and importlib.util.find_spec("torch"):
            found += [
                Rival(name, 1, both, _later("torch_fit", dtype=dtype), dtype=dtype, label=label)
                for name, dtype, label in (
                    ("torch", "float32", "PyTorch"), ("torch/bfloat16", "bfloat16", "PyTorch, bfloat16")
                )
            ]  # fmt: skip
    return found


def _later(module: str, function: str = "train", **options) -> Callable:
    """Returns a function of a module beside this one, with some arguments bound, that imports the module when called.

    Keras must not be imported in the port's process, which would pay for it in time and memory.
    """

    def call(*args):
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)(*args, **options)

    return call
