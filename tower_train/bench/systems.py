"""The sides of each comparison. No TensorFlow here."""

import dataclasses
import fnmatch
from typing import Any

from tower_train import config, errors
from tower_train.bench.options import BenchmarkOptions

CEILING = "ceiling"
TRAINER = "tower_train"
LOG_LINES, REPORTS, SILENCE, UNGUARDED = "log lines", "reports", "silence", "unguarded"


@dataclasses.dataclass(frozen=True)
class System:
    """One side: what a worker process runs.

    Attributes:
      name: its row in the table.
      kind: 'trainer', 'rival' or 'matmul', which `sides` knows how to run.
      settings: what it runs, for `sides`.
      batch_size: examples a step; None where steps have no examples.
      dtype: its arithmetic, which says what ceiling it is held against; None for none.
      is_anchor: others are compared with it, so it is measured along with every group of sides.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    batch_size: int | None
    dtype: str | None = "float32"
    is_anchor: bool = False


def dtypes() -> tuple[str, ...]:
    """float32, and bfloat16 where the trainer knows it."""
    (field,) = (field for field in dataclasses.fields(config.Config) if field.name == "dtype")
    return tuple(dtype for dtype in ("float32", "bfloat16") if dtype in field.metadata["choices"])


def comparison(options: BenchmarkOptions, about: dict) -> list[System]:
    """The sides of the table.

    Args:
      options: which of them.
      about: what `sides.describe` found out.

    Raises:
      ConfigError: --systems matches none.
    """
    sides = rivals(options, about) + trainers(options, about) + ceilings()
    if options.quick:
        return [side for side in sides if _is_telling(side, options)]
    if not options.systems:
        return sides
    patterns = options.systems.split(",")
    chosen = [side for side in sides if any(fnmatch.fnmatchcase(side.name, pattern) for pattern in patterns)]
    if not chosen:
        raise errors.ConfigError(
            f"--systems={options.systems} matches no side. Here are: {', '.join(side.name for side in sides)}."
        )
    return chosen


def rivals(options: BenchmarkOptions, about: dict) -> list[System]:
    """The workload's rivals that this machine has the devices for."""
    return [
        System(rival["name"], "rival", rival, options.batch_size, is_anchor=rival["name"] == about["reference"])
        for rival in about["rivals"]
        if _has_devices(about, rival["num_devices"]) and options.batch_size % rival["num_devices"] == 0
    ]


def trainers(options: BenchmarkOptions, about: dict) -> list[System]:
    """tower_train: every tower count, in every dtype, on fixed inputs and on real ones."""
    return [
        trainer(f"{count_of(towers, 'tower')}/{dtype}/{inputs}", towers, options.batch_size, dtype, inputs == "fixed")
        for inputs in ("fixed", "real")
        for dtype in dtypes()
        for towers in options.tower_counts
        if _has_devices(about, towers)
    ]


def trainer(
    name: str,
    towers: int,
    batch_size: int,
    dtype: str = "float32",
    is_fixed: bool = False,
    reports: str = LOG_LINES,
    warm_up_steps: int | None = None,
) -> System:
    """One tower_train side.

    Args:
      name: what it is called after 'tower_train/'.
      towers: their number.
      batch_size: examples a step, over all towers.
      dtype: of the arithmetic.
      is_fixed: train on one distorted batch that is part of the graph, in place of a stream of images.
      reports: LOG_LINES, REPORTS for summaries and checkpoints too, all as often as by default, SILENCE, or UNGUARDED
        for silence without the check of each step that it is finite.
      warm_up_steps: done before it is measured; None for the usual few.
    """
    settings = dict(towers=towers, dtype=dtype, is_fixed=is_fixed, reports=reports)
    if warm_up_steps is not None:
        settings["warm_up_steps"] = warm_up_steps
    return System(f"{TRAINER}/{name}", "trainer", settings, batch_size, dtype)


def ceilings() -> list[System]:
    """How fast this machine multiplies matrices."""
    return [
        System(f"{CEILING}/{dtype} matrix product", "matmul", {"dtype": dtype}, None, dtype, is_anchor=True)
        for dtype in dtypes()
    ]


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _has_devices(about: dict, count: int) -> bool:
    """Any number of logical CPU devices can be had; GPUs are as many as there are."""
    return not about["gpus"] or count <= len(about["gpus"])


def _is_telling(side: System, options: BenchmarkOptions) -> bool:
    if side.kind == "rival":
        return side.settings["is_telling"]
    if side.kind == "trainer":  # real images with all towers, and with the fewest of them all dtypes and inputs but one
        plain, real = side.dtype == "float32", not side.settings["is_fixed"]
        return plain and real or (plain or real) and side.settings["towers"] == options.tower_counts[0]
    return True
