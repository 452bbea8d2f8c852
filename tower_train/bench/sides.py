"""The options of the benchmark, and the sides that it measures under them. No TensorFlow here."""

import dataclasses
import fnmatch
import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tower_train import errors
from tower_train.options import Options, option

FORMS, SIDES, MEASURING = "What to show", "The sides", "Measuring"
_DTYPES = ("float32", "bfloat16")
_SWEEP_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of one tower


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(Options):
    """The sides to compare, and how thoroughly."""

    quick: bool = option(False, "only the most important sides, three rounds of 1.5 seconds", FORMS)
    sweep: bool = option(False, "instead: examples/sec of tower_train alone over batch size and towers", FORMS)
    breakdown: bool = option(
        False,
        "instead: the parts of a step's time, with Chrome trace files, of tower_train alone, and Python's part",
        FORMS,
    )

    systems: str | None = option(
        None, "measure only sides whose name matches one of these, e.g. port,keras/*,tower_train/*/float32 (all)", SIDES
    )
    towers: tuple[int, ...] | None = option(
        None,
        "tower counts to measure (1,2,4,8; with --quick 1,2; with --sweep 1,2,4,8,16)",
        SIDES,
        allowed="at least 1",
    )
    batch_size: int = option(
        128, "examples per step over all towers or replicas of a side", SIDES, allowed="at least 1"
    )
    device: str = option(
        "auto", "gpu, cpu, or auto: GPUs if there are any, else CPU", SIDES, allowed=("auto", "gpu", "cpu")
    )
    workload: str = option("cifar10", "network and data, as an import path; rivals are in MODULE.rivals", SIDES)
    model: str | None = option(None, "name of one of the workload's models, if it has several (its default)", SIDES)
    dataset: str = option("auto", "name of one of the workload's data sets", SIDES)
    data_dir: str | None = option(None, "directory of the data (~/.cache/tower_train)", SIDES)

    rounds: int | None = option(None, "measurements of each side (5; with --quick 3)", MEASURING, allowed="at least 1")
    seconds: float | None = option(
        None, "seconds that each measurement takes (5; with --quick 1.5)", MEASURING, allowed="above 0"
    )
    start_together: bool = option(
        False, "start the processes of all sides at once, on a machine with many cores", MEASURING
    )
    timeout_secs: float = option(
        300.0,
        "seconds after which a side that has not started, or not finished a measurement, is given up",
        MEASURING,
        allowed="above 0",
    )
    out: str | None = option(None, "directory of the results (a new runs/benchmark-TIME)", MEASURING)

    def check(self):
        forms = [name for name in ("quick", "sweep", "breakdown", "systems") if getattr(self, name)]
        if len(forms) > 1:
            raise errors.ConfigError(f"--{forms[0]} and --{forms[1]} exclude each other. Give one of them.")
        for towers in self.tower_counts:
            if self.batch_size % towers:
                raise errors.ConfigError(
                    f"--batch_size={self.batch_size} cannot be shared out evenly among {towers} towers. Choose a "
                    "multiple, or other --towers."
                )

    @property
    def tower_counts(self) -> tuple[int, ...]:
        if self.towers:
            return self.towers
        return (1, 2) if self.quick else (1, 2, 4, 8, 16) if self.sweep else (1, 2, 4, 8)

    @property
    def num_rounds(self) -> int:
        return self.rounds or (3 if self.quick else 5)

    @property
    def seconds_each(self) -> float:
        return self.seconds or (1.5 if self.quick else 5.0)


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to train, which a process of its own runs."""

    name: str  # its name for --systems
    # 'module:function'. Only the side's process imports the module. The function gets (request, batch_size, after_step)
    # and the arguments; it trains on the examples of a `DataRequest`, batch_size per step over all devices, until
    # `after_step(loss)`, called after every step, returns True
    train: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # further arguments of `train`, for JSON
    num_devices: int = 1  # number of GPUs, or logical CPU devices, on which it trains
    is_quick: bool = False  # whether --quick has it
    # its name in tables and figures; empty if that is `name`. It ends with ', DTYPE' if that is not float32
    label: str = ""
    batch_size: int | None = None  # examples per step; None for --batch_size
    # whether its process does not import TensorFlow; `train` gets the request as a dictionary then
    without_tensorflow: bool = False

    @property
    def title(self) -> str:
        return self.label or self.name


def keras_sides(
    train: str, is_on_gpu: bool, dtypes: Sequence[str] = ("float32", "bfloat16"), **arguments
) -> list[Side]:
    """Returns the sides of a network that `train`, 'module:function', fits by Keras: plainly and by multi_gpu_model,
    and on a GPU, where `fit` compiles, also not compiled. arguments: further ones of `train`."""
    forms = {
        "fit": ("Keras fit", {}),
        "multi_gpu_model": ("multi_gpu_model, 1 tower", {"form": "multi_gpu_model"}),
        "fit/not compiled": ("Keras fit, not compiled", {"jit_compile": False}),
    }
    sides = []
    for dtype, (form, (label, more)) in itertools.product(dtypes, forms.items()):
        name = f"keras/{form}"
        if dtype != "float32":
            name, label, more = f"{name}/{dtype}", f"{label}, {dtype}", more | {"dtype_policy": f"mixed_{dtype}"}
        if is_on_gpu or form != "fit/not compiled":
            sides.append(Side(name, train, arguments | more, is_quick=form == "fit", label=label))
    return sides


def torch_sides(network: str, recipe: dict, is_on_gpu: bool) -> list[Side]:
    """Returns the sides of a network of torch_fit, on a GPU also by torch.compile, which on CPUs is for other networks;
    none if PyTorch is not installed. recipe: its numbers."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    sides = []
    for form, dtype in itertools.product(("", "compiled") if is_on_gpu else ("",), ("float32", "bfloat16")):
        ways = [way for way in (form, dtype.removeprefix("float32")) if way]
        name, label = "/".join(["torch", *ways]), ", ".join([f"PyTorch {version}", *ways])
        arguments = dict(network=network, recipe=recipe, autocast=dtype != "float32", compiled=bool(form))
        side = Side(name, "tower_train.bench.torch_fit:train", arguments, 1, not form, label)
        sides.append(dataclasses.replace(side, without_tensorflow=True))
    return sides


def parts(options: BenchmarkOptions, common: dict, rivals: Sequence[Side]) -> dict[str, list[Side]]:
    """Returns what to measure, {title: sides}; ratios are taken to the first side of a part. common, rivals: from
    `trainer.common_facts`. Raises ConfigError if --systems matches none."""

    def has_devices(side: Side) -> bool:  # any number of logical CPU devices
        return not common["gpus"] or side.num_devices <= len(common["gpus"])

    every, patterns = _every_side(options, common, rivals), (options.systems or "*").split(",")
    if options.sweep:
        found = _sweep(options)
    elif options.quick:
        found = {"Training": [side for side in every if side.is_quick]}
    else:
        found = {"Training": [side for side in every if any(fnmatch.fnmatchcase(side.name, each) for each in patterns)]}
    found = {title: list(filter(has_devices, sides)) for title, sides in found.items()}
    found = {title: sides for title, sides in found.items() if sides}
    if not found:
        raise errors.ConfigError(
            f"--systems={options.systems or '*'} matches no side that this machine has the devices for. Here are: "
            f"{', '.join(side.name for side in every if has_devices(side))}."
        )
    return found


def _every_side(options: BenchmarkOptions, common: dict, rivals: Sequence[Side]) -> list[Side]:
    """Returns the rivals, then tower_train with every tower count and dtype.

    No rival has Muon, so towers train by momentum as they do; with a recipe's Muon in sides of their own.
    """
    sides = [rival for rival in rivals if options.batch_size % rival.num_devices == 0]
    has_muon = common["optimizer"] == "muon"
    alike = {"optimizer": "momentum"} if has_muon else {}
    for dtype in _DTYPES:
        for towers in options.tower_counts:
            name, fewest = f"{counted(towers, 'tower')}/{dtype}", towers == options.tower_counts[0]
            sides.append(_trainer(options, name, towers, dtype, alike, is_quick=dtype == "float32" or fewest))
            if common["gpus"]:
                never = alike | {"jit_compile": "never"}
                sides.append(_trainer(options, f"{name}/not compiled", towers, dtype, never))
            if has_muon:
                sides.append(_trainer(options, f"{name}/Muon", towers, dtype))
    return sides


def _sweep(options: BenchmarkOptions) -> dict[str, list[Side]]:
    return {
        "Batch size, 1 tower": [_trainer(options, f"batch {size}", batch_size=size) for size in _SWEEP_BATCH_SIZES],
        f"Towers, {options.batch_size} examples a step": [
            _trainer(options, counted(towers, "tower"), towers) for towers in options.tower_counts
        ],
    }


def _trainer(
    options: BenchmarkOptions,
    name: str,
    towers: int = 1,
    dtype: str = "float32",
    of_config: Mapping[str, str] | None = None,
    **more,
) -> Side:
    """Makes a side of tower_train. of_config: further options of Config; more: attributes of Side."""
    arguments = dict(
        workload=options.workload,
        model=options.model,
        device=options.device,
        towers=towers,
        dtype=dtype,
        **(of_config or {}),
    )
    label = f"tower_train, {name.replace('/', ', ')}"
    return Side(f"tower_train/{name}", "tower_train.bench.trainer:train", arguments, towers, label=label, **more)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
