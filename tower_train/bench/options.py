"""The options of `python -m tower_train.benchmark`. No TensorFlow here."""

import dataclasses

from tower_train import errors
from tower_train.options import Options, option

FORMS, SIDES, MEASURING = "What to show", "The sides", "Measuring"


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(Options):
    """The sides to compare, and how thoroughly."""

    quick: bool = option(False, "the most telling sides only, in under two minutes on two cores", FORMS)
    sweep: bool = option(
        False, "instead: examples/sec over batch size, towers, and length of the run, of tower_train alone", FORMS
    )
    overhead: bool = option(
        False, "instead: the cost of logging, summaries and checkpoints, and of starting, of tower_train alone", FORMS
    )
    breakdown: bool = option(
        False, "instead: where a step's time goes, with Chrome trace files, of tower_train alone", FORMS
    )

    growing: bool = option(
        False, "instead: towers with copies of the variables, and two processes on this machine, against towers that "
        "share the variables and against TensorFlow's strategies", FORMS,
    )  # fmt: skip

    systems: str | None = option(
        None, "only sides whose name matches one of these, e.g. port,keras/*,tower_train/*/real (all)", SIDES
    )
    towers: tuple[int, ...] | None = option(
        None, "tower counts to measure (1,2,4,8; with --quick 1,2; with --sweep 1,2,4,8,16; with --growing 2,4)",
        SIDES, minimum=1,
    )  # fmt: skip
    batch_size: int = option(128, "examples a step over all towers or replicas of a side", SIDES, minimum=1)
    device: str = option("auto", "gpu, cpu, or auto: GPUs if there are any", SIDES, choices=("auto", "gpu", "cpu"))
    workload: str = option("cifar10", "what is trained: an import path; its rivals are in MODULE.rivals", SIDES)
    model: str | None = option(None, "which of the workload's models, if it has several (its own choice)", SIDES)
    dataset: str = option("auto", "which of the workload's data sets", SIDES)
    data_dir: str | None = option(None, "directory of the data (~/.cache/tower_train)", SIDES)

    rounds: int | None = option(None, "how often each side is measured (5; with --quick 3)", MEASURING, minimum=1)
    seconds: float | None = option(
        None, "how long each side is measured in each round (5; with --quick 1.5)", MEASURING, above=0
    )
    timeout_secs: float = option(
        300.0,
        "how long a side may take to start, or to finish a measurement, before it is given up",
        MEASURING,
        above=0,
    )
    out: str | None = option(None, "directory of the results (a new runs/benchmark-TIME)", MEASURING)

    def check(self):
        forms = [name for name in ("sweep", "overhead", "breakdown", "growing") if getattr(self, name)]
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
