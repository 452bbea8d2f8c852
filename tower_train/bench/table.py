"""Tables for people: Markdown that also reads well on a terminal."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from tower_train.bench import attribution, results, systems
from tower_train.bench.attribution import Breakdown
from tower_train.bench.results import Row
from tower_train.bench.rounds import Measured

_IDLE_SHARE = 0.02  # of one core, that a side may use while it stands still before that is worth a warning


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first column is flush left and whose others are flush right."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0]:<{widths[0]}}", *aligned[1:]]) + " |"

    return [line(head), line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]), *map(line, body)]


def comparison(rows: Sequence[Row], reference: str | None) -> list[str]:
    """The table of the sides; see results.Row."""
    head = ["system", "examples/sec", "spread", f"over {reference or 'reference'}", "of the ceiling", "peak memory",
            "first step"]  # fmt: skip
    body = [
        [
            row.name,
            f"{row.per_sec:.0f}",
            f"+/- {(row.high - row.low) / 2:.0f}",
            _or_dash(row.ratio, ".2f"),
            _or_dash(row.share, ".2f"),
            _or_dash(row.peak_bytes and row.peak_bytes / 2**20, ".0f", " MiB"),
            _or_dash(row.first_step_secs, ".1f", " s"),
        ]
        for row in rows
    ]
    return markdown(head, body)


def sweep(axis: str, found: Mapping[int, Measured]) -> list[str]:
    """A table of {x: what came out}, each also as a ratio to the first, round by round."""
    rates = {x: results.rates_by_round(one) for x, one in found.items()}
    first = next(iter(rates.values()))
    body = []
    for x, by_round in rates.items():
        low, high = results.quartiles(list(by_round.values()))
        body.append([
            f"{x:,}", f"{statistics.median(by_round.values()):.0f}", f"+/- {(high - low) / 2:.0f}",
            _or_dash(results.median_ratio(by_round, first), ".2f"),
            f"{found[x].samples[-1]['resident_bytes'] / 2**20:.0f} MiB",
        ])  # fmt: skip
    return markdown([axis, "examples/sec", "spread", "over the first", "memory at the end"], body)


def opening(machine: dict, about: dict, what: str) -> list[str]:
    """What is measured on what. what: such as '128 examples a step, 5 rounds of 5 s'."""
    gpus = f", {', '.join(about['gpus'])}" if about["gpus"] else ", no GPU"
    lines = [
        f"machine:  {machine['processor']}, {machine['cores']} cores{gpus}, {machine['memory_bytes'] / 2**30:.0f} GiB",
        f"versions: {', '.join(f'{package} {version}' for package, version in machine['versions'].items())}",
        f"data:     {about['data']}",
        f"each:     {what}",
    ]
    return lines + ([f"*** {about['notice']}"] if about["notice"] else [])


def notes(measured: Sequence[Measured], flops_per_example: float | None) -> list[str]:
    """How to read the table, and what went wrong with the measuring, if anything did."""
    lines = [
        "examples/sec: median over rounds; spread: half of what lies between the quartiles; ratios: median of each "
        "round's. first step: from the start of the process."
    ]
    for one in filter(results.is_ceiling, measured):
        gflops = [sample["per_sec"] / 1e9 for sample in one.samples]
        low, high = results.quartiles(gflops)
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
    """Where the results are."""
    return [f"Written:  {', '.join(map(str, paths))}"]


def breakdown(found: Sequence[Breakdown]) -> list[str]:
    """Milliseconds and share of a step by category, a column for each tower count."""
    towers = [f"tower {i}" for i in range(max(one.towers for one in found))]
    after = [
        attribution.AVERAGING, attribution.DECAY_AND_CHECK, attribution.UPDATE, attribution.MOVING_AVERAGES,
        attribution.OTHER, attribution.NOTHING,
    ]  # fmt: skip
    body = [
        [category, *(_part(one, category) for one in found)] for category in [attribution.INPUT_WAIT, *towers, *after]
    ]
    body.append(["a step, without tracing", *(f"{one.step_secs * 1e3:.1f} ms" for one in found)])
    body.append(["cores busy meanwhile", *(f"{one.busy:.0%} of {one.cores}" for one in found)])
    body.append(["cores busy with this", *(f"{one.own:.0%} of {one.cores}" for one in found)])
    return markdown(["", *(systems.count_of(one.towers, "tower") for one in found)], body)


def _part(one: Breakdown, category: str) -> str:
    if category.startswith("tower ") and category not in one.seconds:
        return ""
    return f"{one.seconds.get(category, 0.0) * 1e3:.1f} ms {one.share(category):4.0%}"


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
