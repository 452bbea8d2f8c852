"""Reports: from samples to medians, spreads and ratios, in Markdown tables that are readable on a terminal.

The machine's speed changes during a benchmark, so ratios are taken within a round, and their median is shown.
"""

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tower_train import errors
from tower_train.bench.systems import System

_IDLE_SHARE = 0.02  # of one core, from which a side that should stand still gets a warning


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
class Row:
    """One row of the table.

    Attributes:
      per_sec: examples/sec, the median over rounds; for a ceiling, those of steps of the network's products alone.
      low, high: the first and the third quartile.
      ratio: to the reference, the median over rounds of the ratio within a round; None without a reference.
      share: of the ceiling of the same arithmetic, likewise; None if unknown. A ceiling is one device's; several GPUs
        are compared with as many.
      peak_bytes: resident memory of its process; None for a ceiling.
      card_bytes: memory of a GPU; None without GPUs, and for a ceiling.
      first_step_secs: from the start of its process; None for a ceiling.
    """

    name: str
    per_sec: float
    low: float
    high: float
    ratio: float | None
    share: float | None
    peak_bytes: int | None
    first_step_secs: float | None
    card_bytes: int | None = None


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
        ceiling = {
            number: (side.towers if on_gpus else 1) * rate for number, rate in ceilings.get(side.dtype, {}).items()
        }
        ratios = median_ratio(by_round, rates.get(reference, {})), median_ratio(by_round, ceiling)
        costs = (None, None) if side.is_ceiling else (one.peak_bytes, one.first_step_secs, one.card_bytes or None)
        found.append(Row(side.name, *median_and_quartiles(by_round.values()), *ratios, *costs))
    return found


def median_ratio(rates: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    """Returns the median of the ratios over the rounds in both; None if there are none."""
    ratios = [rate / base[number] for number, rate in rates.items() if number in base]
    return statistics.median(ratios) if ratios else None


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


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table whose first column is left-aligned and whose others are right-aligned."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0]:<{widths[0]}}", *aligned[1:]]) + " |"

    return [line(head), line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]), *map(line, body)]


def comparison(rows: Sequence[Row], reference: str | None) -> list[str]:
    """Formats the table of the sides; see Row."""
    head = ["system", "examples/sec", "spread", f"over {reference or 'reference'}", "of the ceiling", "peak memory",
            "first step"]  # fmt: skip
    on_gpus = any(row.card_bytes for row in rows)
    if on_gpus:
        head.append("of a GPU's memory")
    body = [
        [
            row.name,
            f"{row.per_sec:.0f}",
            f"+/- {(row.high - row.low) / 2:.0f}",
            _or_dash(row.ratio, ".2f"),
            _or_dash(row.share, ".2f"),
            _or_dash(row.peak_bytes and row.peak_bytes / 2**20, ".0f", " MiB"),
            _or_dash(row.first_step_secs, ".1f", " s"),
            *([_or_dash(row.card_bytes and row.card_bytes / 2**20, ".0f", " MiB")] if on_gpus else []),
        ]
        for row in rows
    ]
    return markdown(head, body)


def sweep(axis: str, measured: Mapping[int, Measured]) -> list[str]:
    """Formats a table of {x: measurements at x}, each also as a ratio to the first, round by round."""
    first = next(iter(measured.values())).rates()
    body = []
    for x, one in measured.items():
        median, low, high = median_and_quartiles(one.rates().values())
        body.append([
            f"{x:,}", f"{median:.0f}", f"+/- {(high - low) / 2:.0f}", _or_dash(median_ratio(one.rates(), first), ".2f"),
            f"{one.samples[-1]['resident_bytes'] / 2**20:.0f} MiB",
        ])  # fmt: skip
    return markdown([axis, "examples/sec", "spread", "over the first", "memory at the end"], body)


def opening(machine: dict, about: dict, what: str) -> list[str]:
    """Returns the lines above a table; `what` was measured, such as '128 examples a step, 5 rounds of 5 s'."""
    gpus = f", {', '.join(about['gpus'])}" if about["gpus"] else ", no GPU"
    lines = [
        f"machine:  {machine['processor']}, {machine['cores']} cores{gpus}, {machine['memory_bytes'] / 2**30:.0f} GiB",
        f"versions: {', '.join(f'{package} {version}' for package, version in machine['versions'].items())}",
        f"data:     {about['data']}",
        f"each:     {what}",
    ]
    return lines + ([f"*** {about['notice']}"] if about["notice"] else [])


def notes(measured: Sequence[Measured], flops_per_example: float | None) -> list[str]:
    """Returns the lines below a table: how to read it, and warnings about disturbed measurements."""
    lines = [
        "examples/sec: median over rounds; spread: half of what lies between the quartiles; ratios: median of each "
        "round's. first step: from the start of the process."
    ]
    for one in measured:
        if one.side.is_ceiling:
            _, low, high = median_and_quartiles(sample["per_sec"] / 1e9 for sample in one.samples)
            lines.append(f"{one.side.name}: {low:.0f} to {high:.0f} GFLOP/s between the quartiles.")
    if flops_per_example:
        lines.append(
            f"The network's convolutions and matrix products: {flops_per_example / 1e6:.1f} MFLOP a training example; "
            "a ceiling's examples/sec are what its rate is enough for."
        )
    for one in measured:
        idle, cpu = (sum(sample[name] for sample in one.samples) for name in ("idle_secs", "idle_cpu_secs"))
        if cpu > _IDLE_SHARE * idle:
            lines.append(f"Warning: {one.side.name} used {cpu / idle:.0%} of a core while others were measured.")
    return lines


def written(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the line that names the files of the results."""
    return [f"Written:  {', '.join(map(str, paths))}"]


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
