"""Reports of results: Markdown tables that are readable on a terminal, with what was measured and how to read them."""

import pathlib
from collections.abc import Mapping, Sequence

from tower_train.bench import results
from tower_train.bench.results import (
    MOST_DIFFERENCE,
    MOST_SPAN,
    Measured,
    Ratio,
    Results,
    Row,
    median_and_quartiles,
)

_IDLE_SHARE = 0.02  # of one core, from which a side that should stand still gets a warning


def comparison(found: Results) -> list[str]:
    """Returns the table of the sides, or why there is none."""
    rows, options = found.rows(), found.options
    what = f"{options.batch_size} examples a step, {options.num_rounds} rounds of {options.seconds_each:g} s"
    flops = found.about["flops_per_example"]
    reference = next((row.side.title for row in rows if row.side.name == found.reference), None)
    reason = results.too_noisy(rows)
    body = [reason] if reason else [*table(rows), "", *notes(found.measured, flops, reference)]
    return [*opening(found.machine, found.about, what, found.date), "", *body]


def sweep(found: Results) -> list[str]:
    """Returns a table for each part of a sweep, or why there is none."""
    options = found.options
    what = f"{options.num_rounds} rounds of {options.seconds_each:g} s, float32, real data"
    lines = opening(found.machine, found.about, what, found.date)
    memory = {one.side.name: one.samples[-1]["resident_bytes"] for one in found.measured}
    curves = found.curves()
    if reason := results.too_noisy([row for _, curve in curves for row in curve.values()]):
        return [*lines, "", reason]
    for part, curve in curves:
        body = [
            [f"{x:,}", *_speed(row), *_ratio(row.ratio), f"{memory[row.side.name] / 2**20:.0f} MiB"]
            for x, row in curve.items()
        ]
        lines += ["", part["title"], ""]
        lines += markdown([part["axis"], "examples/sec", "spread", "ratio", "range", "memory at the end"], body)
    return [*lines, "", "ratio: to the first line. " + _how_to_read()]


def table(rows: Sequence[Row]) -> list[str]:
    """Formats the table of the sides; see Row."""
    head = ["system", "examples/sec", "spread", "ratio", "range", "of the ceiling", "peak memory", "first step"]
    on_gpus = any(row.card_bytes for row in rows)
    if on_gpus:
        head.append("of a GPU's memory")
    body = [
        [
            row.side.title,
            *_speed(row),
            *_ratio(row.ratio),
            _ratio(row.share)[0],
            _or_dash(row.peak_bytes and row.peak_bytes / 2**20, ".0f", " MiB"),
            _or_dash(row.first_step_secs, ".1f", " s"),
            *([_or_dash(row.card_bytes and row.card_bytes / 2**20, ".0f", " MiB")] if on_gpus else []),
        ]
        for row in rows
    ]
    return markdown(head, body)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table whose first column is left-aligned and whose others are right-aligned."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0]:<{widths[0]}}", *aligned[1:]]) + " |"

    return [line(head), line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]), *map(line, body)]


def opening(machine: Mapping, about: Mapping, what: str, date: str | None = None) -> list[str]:
    """Returns the lines above a table; `what` was measured, such as '128 examples a step, 5 rounds of 5 s'."""
    lines = [
        f"machine:  {machine_in_words(machine, about)}{f', {date}' if date else ''}",
        f"versions: {', '.join(f'{package} {version}' for package, version in machine['versions'].items())}",
        f"data:     {about['data']}",
        f"each:     {what}",
    ]
    return lines + ([f"*** {about['notice']}"] if about["notice"] else [])


def machine_in_words(machine: Mapping, about: Mapping) -> str:
    """Describes processor, GPUs and memory."""
    gpus = ", ".join(about["gpus"]) or "no GPU"
    return f"{machine['processor']}, {machine['cores']} cores, {gpus}, {machine['memory_bytes'] / 2**30:.0f} GiB"


def notes(measured: Sequence[Measured], flops_per_example: float | None, reference: str | None) -> list[str]:
    """Returns the lines below a table: how to read it, and warnings about disturbed measurements."""
    lines = [f"ratio: to {reference}. {_how_to_read()} first step: from the start of the process."]
    ceilings = [one for one in measured if one.side.is_ceiling]
    for one in ceilings:
        _, low, high = median_and_quartiles(sample["per_sec"] / 1e9 for sample in one.samples)
        lines.append(f"{one.side.title}: {low:.0f} to {high:.0f} GFLOP/s between the quartiles.")
    if flops_per_example and ceilings:
        lines.append(
            f"The network's convolutions and matrix products: {flops_per_example / 1e6:.1f} MFLOP a training example; "
            "a ceiling's examples/sec are what its rate is enough for. A side beyond its ceiling computes convolutions "
            "with fewer products than are counted."
        )
    for one in measured:
        idle, cpu = (sum(sample[name] for sample in one.samples) for name in ("idle_secs", "idle_cpu_secs"))
        if cpu > _IDLE_SHARE * idle:
            lines.append(f"Warning: {one.side.title} used {cpu / idle:.0%} of a core while others were measured.")
    return lines


def written(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the line that names the files of the results."""
    return [f"Written:  {', '.join(map(str, paths))}"]


def _how_to_read() -> str:
    return (
        "examples/sec: median over rounds; spread: half of what lies between the quartiles; ratios: median of each "
        "round's; range: the lowest and the highest of them. A ratio is too noisy to be told if its range spans more "
        f"than a factor of {MOST_SPAN:g}, or if it differs by more than {MOST_DIFFERENCE:.0%} from that of the rates."
    )


def _speed(row: Row) -> list[str]:
    return [f"{row.per_sec:.0f}", f"+/- {(row.high - row.low) / 2:.0f}"]


def _ratio(ratio: Ratio | None) -> list[str]:
    """Returns the cells of a ratio and its range."""
    if not ratio:
        return ["-", "-"]
    span = f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.is_measured else "-"
    return ["too noisy" if ratio.is_noisy else f"{ratio.median:.2f}", span]


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
