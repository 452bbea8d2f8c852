"""Results of the benchmark: the measurements, their file, and their arithmetic, from samples to medians and ratios.

The machine's speed changes during a benchmark, so ratios are taken within a round. If the ratios of the rounds differ
widely, or their median differs from the ratio of the rates beside it, they are about the machine and not the sides.
"""

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tower_train import errors
from tower_train.bench.systems import BenchmarkOptions, System

# A ratio is too noisy if its highest value is more than so many times its lowest, or if it differs from the ratio of
# the median rates by more than this share of it.
MOST_SPAN, MOST_DIFFERENCE = 1.5, 0.1


@dataclasses.dataclass
class Measured:
    """The measurements of one side, all of which go to benchmark.json.

    Attributes:
      first_step_secs: from the start of its process to the end of its first step.
      import_secs: the part of importing TensorFlow.
      work_per_step: examples, or for a ceiling floating-point operations.
      peak_bytes: resident memory at its peak.
      card_bytes: likewise of the GPU with most of it; 0 without.
      samples: one per round, with round, steps, seconds, per_sec (work per second) and the worker's other entries.
    """

    side: System
    first_step_secs: float = 0.0
    import_secs: float = 0.0
    work_per_step: int = 0
    peak_bytes: int = 0
    card_bytes: int = 0
    samples: list[dict] = dataclasses.field(default_factory=list)

    def rates(self, flops_per_example: float | None = None) -> dict[int, float]:
        """Returns examples/sec by round; for a ceiling, the examples/sec for which its operations/sec suffice."""
        per_example = flops_per_example if self.side.is_ceiling else 1
        return {sample["round"]: sample["per_sec"] / per_example for sample in self.samples}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The ratio of two sides' rates.

    Attributes:
      median, low, high: of the ratios within the rounds; low and high are the lowest and the highest.
      of_medians: the ratio of the median rates, each over all rounds of its side.
    """

    median: float
    low: float
    high: float
    of_medians: float

    @property
    def is_measured(self) -> bool:
        """True for several rounds, and two sides: a side's ratio to itself is 1."""
        return self.low < self.high

    @property
    def is_noisy(self) -> bool:
        """True if it is about the machine and not the sides."""
        return self.high > MOST_SPAN * self.low or abs(self.median / self.of_medians - 1) > MOST_DIFFERENCE


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      per_sec: examples/sec, the median over rounds; for a ceiling, those of steps of the network's products alone.
      low, high: the first and the third quartile.
      ratio: to the reference; None without one.
      share: of the ceiling of the same arithmetic; None if unknown. A ceiling is one device's; several GPUs are
        compared with as many.
      ceiling: that ceiling in examples/sec, the median over rounds.
      peak_bytes: resident memory of its process; None for a ceiling.
      card_bytes: memory of a GPU; None without GPUs, and for a ceiling.
      first_step_secs: from the start of its process; None for a ceiling.
    """

    side: System
    per_sec: float
    low: float
    high: float
    ratio: Ratio | None = None
    share: Ratio | None = None
    ceiling: float | None = None
    peak_bytes: int | None = None
    first_step_secs: float | None = None
    card_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Results:
    """The content of a file of results.

    Attributes:
      machine: `host.describe` at the beginning.
      about: workload, data and devices, from `sides.describe`.
      date: of the end, in words.
      reference: the name of the side that ratios are taken to, or None.
      parts: of a sweep, {"axis": what changes, "title": in words, "points": {value: name of its side}} for each curve.
    """

    options: BenchmarkOptions
    machine: dict
    about: dict
    date: str
    measured: list[Measured]
    reference: str | None = None
    parts: list[dict] = dataclasses.field(default_factory=list)

    @property
    def on_gpus(self) -> bool:
        return bool(self.about["gpus"])

    def rows(self) -> list[Row]:
        """Returns the rows of a comparison."""
        return rows(self.measured, self.reference, self.about["flops_per_example"], self.on_gpus)

    def curves(self) -> list[tuple[dict, dict[int, Row]]]:
        """Returns each part of a sweep with its rows by value of x, whose ratios are to the first of them."""
        by_name = {one.side.name: one for one in self.measured}
        found = []
        for part in self.parts:
            points = [by_name[name] for name in part["points"].values()]
            of_part = rows(points, points[0].side.name, None)
            found.append((part, dict(zip(map(int, part["points"]), of_part, strict=True))))
        return found


def rows(
    measured: Sequence[Measured], reference: str | None, flops_per_example: float | None, on_gpus: bool = False
) -> list[Row]:
    """Makes a row for each side; none for ceilings if the network's arithmetic is unknown.

    Args:
      measured: the sides.
      reference: the name of the side that ratios are taken to; it need not be among them.
      flops_per_example: of the network, or None.
      on_gpus: whether each tower or replica has its own device; logical CPU devices share the cores.
    """
    if flops_per_example is None:
        measured = [one for one in measured if not one.side.is_ceiling]
    rates = {one.side.name: one.rates(flops_per_example) for one in measured}
    ceilings = {one.side.dtype: rates[one.side.name] for one in measured if one.side.is_ceiling}
    found = []
    for one in measured:
        side, by_round = one.side, rates[one.side.name]
        speed = median_and_quartiles(by_round.values())
        devices = side.towers if on_gpus else 1
        ceiling = {number: devices * rate for number, rate in ceilings.get(side.dtype, {}).items()}
        ratios = ratio(by_round, rates.get(reference, {})), ratio(by_round, ceiling)
        height = statistics.median(ceiling.values()) if ceiling else None
        costs = (None, None) if side.is_ceiling else (one.peak_bytes, one.first_step_secs, one.card_bytes or None)
        found.append(Row(side, *speed, *ratios, height, *costs))
    return found


def ratio(rates: Mapping[int, float], base: Mapping[int, float]) -> Ratio | None:
    """Returns the ratio of rates by round over the rounds in both; None if there are none."""
    ratios = [rate / base[number] for number, rate in rates.items() if number in base]
    if not ratios:
        return None
    of_medians = statistics.median(rates.values()) / statistics.median(base.values())
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), of_medians)


def too_noisy(rows: Sequence[Row]) -> str | None:
    """Returns why not to believe the rows, if more than half of their ratios are too noisy; else None."""
    ratios = [ratio for row in rows for ratio in (row.ratio, row.share) if ratio and ratio.is_measured]
    noisy = sum(ratio.is_noisy for ratio in ratios)
    if 2 * noisy <= len(ratios):
        return None
    return (
        f"This machine was too noisy: {noisy} of {len(ratios)} ratios between systems span more than a factor of "
        f"{MOST_SPAN:g} over the rounds, or differ by more than {MOST_DIFFERENCE:.0%} from the ratio of the median "
        "rates. So there is no table and no figure. Measure while the machine has nothing else to do, or for longer "
        "(--rounds, --seconds)."
    )


def median_and_quartiles(values) -> tuple[float, float, float]:
    """Returns the median, the first and the third quartile, interpolated linearly."""
    return tuple(np.quantile(list(values), [0.5, 0.25, 0.75]).tolist())


def directory(out: str | None) -> pathlib.Path:
    """Makes the directory of the results, a new one in runs/ unless it is named; ConfigError if that fails."""
    out = pathlib.Path(out or f"runs/benchmark-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ConfigError(f"--out={out} cannot be made ({error.strerror}). Give a directory that can.") from None
    return out


def write(path: pathlib.Path, content: dict) -> pathlib.Path:
    """Writes results as JSON; returns the path."""
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read(path: pathlib.Path) -> Results:
    """Reads the results of a comparison or a sweep; ConfigError if there are none."""
    allowed = "Give a benchmark.json, growing.json or sweep.json of this version."
    try:
        content = json.loads(path.read_text())
        measured = [Measured(**side | {"side": System(**side["side"])}) for side in content["sides"]]
        found = Results(
            BenchmarkOptions(**content["options"]), content["machine"], content["about"], content["date"], measured,
            content["reference"], content["parts"],
        )  # fmt: skip
        found.curves() if found.parts else found.rows()
        return found
    except OSError as error:
        raise errors.ConfigError(f"{path} cannot be read ({error.strerror}). {allowed}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise errors.ConfigError(f"{path} holds no results of a comparison or a sweep ({error!r}). {allowed}") from None
