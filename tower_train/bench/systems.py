"""The options of the benchmark, and the sides that each comparison has under them. No TensorFlow here."""

import dataclasses
import fnmatch
from typing import Any

from tower_train import errors
from tower_train.options import Options, option

CEILING = "ceiling"
TRAINER = "tower_train"
DTYPES, ON_REQUEST = ("float32", "bfloat16"), "float16"  # the last only if --systems names it
LOG_LINES, REPORTS, SILENCE, UNGUARDED = "log lines", "reports", "silence", "unguarded"
# The steps between REPORTS, far fewer than by default; each a multiple of the one before.
REPORT_STEPS = {"log_every_steps": 6, "summary_every_steps": 30, "save_every_steps": 60}
FORMS, SIDES, MEASURING = "What to show", "The sides", "Measuring"


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(Options):
    """The sides to compare, and how thoroughly."""

    quick: bool = option(False, "only the most important sides, in under two minutes on two cores", FORMS)
    sweep: bool = option(
        False, "instead: examples/sec of tower_train alone over batch size, towers and length of the run", FORMS
    )
    overhead: bool = option(
        False, "instead: the cost of logging, summaries, checkpoints and starting, of tower_train alone", FORMS
    )
    breakdown: bool = option(
        False, "instead: the parts of a step's time, with Chrome trace files, of tower_train alone", FORMS
    )

    redraw: str | None = option(
        None, "instead: show the tables of an earlier benchmark.json, growing.json or sweep.json, and draw its figures "
        "beside it", FORMS,
    )  # fmt: skip

    growing: bool = option(
        False, "instead: mirrored variables, and two worker processes on this machine, against shared variables and "
        "TensorFlow's strategies", FORMS,
    )  # fmt: skip

    systems: str | None = option(
        None, "measure only sides whose name matches one of these, e.g. port,keras/*,tower_train/*/real (all)", SIDES
    )
    towers: tuple[int, ...] | None = option(
        None, "tower counts to measure (1,2,4,8; with --quick 1,2; with --sweep 1,2,4,8,16; with --growing 2,4)",
        SIDES, minimum=1,
    )  # fmt: skip
    batch_size: int = option(128, "examples per step over all towers or replicas of a side", SIDES, minimum=1)
    device: str = option(
        "auto", "gpu, cpu, or auto: GPUs if there are any, else CPU", SIDES, choices=("auto", "gpu", "cpu")
    )
    workload: str = option("cifar10", "network and data, as an import path; rivals are in MODULE.rivals", SIDES)
    model: str | None = option(None, "name of one of the workload's models, if it has several (its default)", SIDES)
    dataset: str = option("auto", "name of one of the workload's data sets", SIDES)
    data_dir: str | None = option(None, "directory of the data (~/.cache/tower_train)", SIDES)

    rounds: int | None = option(None, "measurements of each side (5; with --quick 3)", MEASURING, minimum=1)
    seconds: float | None = option(
        None, "seconds that each measurement takes (5; with --quick 1.5)", MEASURING, above=0
    )
    timeout_secs: float = option(
        300.0, "seconds after which a side that has not started, or not finished a measurement, is given up",
        MEASURING, above=0,
    )  # fmt: skip
    out: str | None = option(None, "directory of the results (a new runs/benchmark-TIME)", MEASURING)

    def check(self):
        forms = [name for name in ("sweep", "overhead", "breakdown", "growing", "redraw") if getattr(self, name)]
        if len(forms) > 1:
            raise errors.ConfigError(
                f"--{forms[0]} and --{forms[1]} exclude each other. Run the command once for each."
            )
        if self.systems and (forms or self.quick):
            other = forms[0] if forms else "quick"
            raise errors.ConfigError(f"--systems and --{other} both choose the sides. Give one of them.")
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
        if self.growing:
            return (2, 4)
        return (1, 2) if self.quick else (1, 2, 4, 8, 16) if self.sweep else (1, 2, 4, 8)

    @property
    def num_rounds(self) -> int:
        return self.rounds or (3 if self.quick else 5)

    @property
    def seconds_each(self) -> float:
        return self.seconds or (1.5 if self.quick else 5.0)


@dataclasses.dataclass(frozen=True)
class System:
    """One side, which a worker process runs.

    Attributes:
      name: its name for --systems.
      kind: 'trainer', 'rival' or 'matmul', for `sides`.
      settings: further arguments for `sides`.
      batch_size: examples per step; None if steps have no examples.
      dtype: of its arithmetic, and so of its ceiling.
      is_anchor: others are compared with it, so it is measured along with every group of sides.
      label: its name in tables and figures; empty if that is `name`. A label of tower_train is 'tower_train, TOWERS,
        INPUT, DTYPE'; one of others ends with ', DTYPE' if that is not float32.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    batch_size: int | None
    dtype: str | None = "float32"
    is_anchor: bool = False
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def is_ceiling(self) -> bool:
        return self.kind == "matmul"

    @property
    def towers(self) -> int:
        """The number of towers or replicas that share a step, each on a device."""
        return self.settings.get("towers") or self.settings.get("num_devices", 1)


def comparison(options: BenchmarkOptions, about: dict) -> list[System]:
    """Returns the sides of the table; `about` is from `sides.describe`. ConfigError if there are none."""
    dtypes = (*DTYPES, ON_REQUEST) if ON_REQUEST in (options.systems or "") else DTYPES
    theirs, ours = rivals(options, about), trainers(options, about, dtypes) + ceilings(dtypes)
    if options.growing:
        sides = growing(options, about) + [side for side in theirs if "growing" in side.settings["forms"]]
        if not sides:
            raise errors.ConfigError("--growing is about several towers, which this machine has no GPUs for.")
        return sides
    if not options.systems:
        form = "quick" if options.quick else "full"
        ours = [side for side in ours if _is_telling(side, options)] if options.quick else ours
        return [side for side in theirs if form in side.settings["forms"]] + ours
    sides = theirs + ours
    sides += [side for side in growing(options, about) if side.name not in {other.name for other in sides}]
    patterns = options.systems.split(",")
    chosen = [side for side in sides if any(fnmatch.fnmatchcase(side.name, pattern) for pattern in patterns)]
    if not chosen:
        raise errors.ConfigError(
            f"--systems={options.systems} matches no side. Here are: {', '.join(side.name for side in sides)}."
        )
    return chosen


def rivals(options: BenchmarkOptions, about: dict) -> list[System]:
    """Returns the workload's rivals for which this machine has the devices."""
    return [
        System(
            rival["name"],
            "rival",
            rival,
            options.batch_size,
            rival["dtype"],
            is_anchor=rival["name"] == about["reference"],
            label=rival.get("label", ""),
        )  # fmt: skip
        for rival in about["rivals"]
        if _has_devices(about, rival["num_devices"], rival["num_processes"])
        and options.batch_size % (rival["num_devices"] * rival["num_processes"]) == 0
    ]


def trainers(options: BenchmarkOptions, about: dict, dtypes: tuple[str, ...]) -> list[System]:
    """Returns sides of tower_train: every tower count, in each of the dtypes, on fixed inputs and on real ones."""
    return [
        trainer(
            f"{count_of(towers, 'tower')}/{dtype}/{inputs}",
            towers,
            options.batch_size,
            dtype,
            label=f"{count_of(towers, 'tower')}, {'fixed batch' if inputs == 'fixed' else 'real data'}, {dtype}",
            is_fixed=inputs == "fixed",
        )  # fmt: skip
        for inputs in ("fixed", "real")
        for dtype in dtypes
        for towers in options.tower_counts
        if _has_devices(about, towers)
    ]


def growing(options: BenchmarkOptions, about: dict) -> list[System]:
    """Returns towers with shared variables on the CPU, towers with mirrored variables, and two processes.

    All others are compared with the first of them.
    """
    sides = []
    for towers in options.tower_counts:
        if towers > 1 and _has_devices(about, towers):
            name = count_of(towers, "tower")
            shared = trainer(f"{name}/float32/real", towers, options.batch_size, label=f"{name}, real data, float32")
            sides.append(dataclasses.replace(shared, is_anchor=not sides))
            for kind in ("collective", "add_n"):
                own = dict(variable_update="mirrored", all_reduce=kind)
                label = f"{name}, mirrored variables, {kind}"
                sides.append(trainer(f"{name}/mirrored/{kind}", towers, options.batch_size, label=label, **own))
    if _has_devices(about, 1, processes=2) and options.batch_size % 2 == 0:
        sides.append(trainer("2 workers", 1, options.batch_size, label="2 workers", num_processes=2))
    return sides


def trainer(
    name: str, towers: int, batch_size: int, dtype: str = "float32", label: str = "", **settings
) -> System:  # fmt: skip
    """Makes a side of tower_train named 'tower_train/NAME', with batch_size examples per step over all towers.

    Args:
      label: the part of its label after 'tower_train, '; empty for none.
      settings: is_fixed, to train on one distorted batch in the graph instead of a stream of images; reports:
        LOG_LINES (as often as by default), REPORTS (with summaries and checkpoints, all every REPORT_STEPS), SILENCE or
        UNGUARDED (silence without the check that each step is finite); warm_up_steps before it is measured;
        num_processes, variable_update and all_reduce.
    """
    defaults = dict(is_fixed=False, reports=LOG_LINES, num_processes=1, variable_update="auto", all_reduce=None)
    settings = defaults | dict(towers=towers, dtype=dtype) | settings
    label = f"{TRAINER}, {label}" if label else ""
    return System(f"{TRAINER}/{name}", "trainer", settings, batch_size, dtype, label=label)


def ceilings(dtypes: tuple[str, ...]) -> list[System]:
    """Returns the sides that measure how fast this machine multiplies matrices of these dtypes."""
    return [
        System(
            f"{CEILING}/{dtype} matrix product",
            "matmul",
            {"dtype": dtype},
            None,
            dtype,
            is_anchor=True,
            label=f"ceiling: matrix products, {dtype}",
        )  # fmt: skip
        for dtype in dtypes
    ]


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _has_devices(about: dict, count: int, processes: int = 1) -> bool:
    """Returns whether there are enough devices: any number of logical CPU devices, or GPUs for one process."""
    return not about["gpus"] or (count <= len(about["gpus"]) and processes == 1)


def _is_telling(side: System, options: BenchmarkOptions) -> bool:
    """Returns whether a quick benchmark has this side of tower_train or this ceiling."""
    if side.is_ceiling:
        return True
    # Real images with all tower counts, and with the fewest towers all dtypes and inputs but one.
    plain, real = side.dtype == "float32", not side.settings["is_fixed"]
    return plain and real or (plain or real) and side.settings["towers"] == options.tower_counts[0]
