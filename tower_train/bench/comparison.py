"""The comparison and the sweep: benchmark.json or sweep.json with its figure, and Markdown tables for a terminal."""

import dataclasses
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence

from tower_train import console, errors, host
from tower_train.bench import measure, plots, sides, trainer
from tower_train.bench.measure import Figure, Result
from tower_train.bench.sides import BenchmarkOptions


def run(options: BenchmarkOptions) -> list[str]:
    """Compares the sides part by part, each in rounds of its own; returns the lines to print. Raises SideError if one
    dies or hangs."""
    out, machine = directory(options.out), host.describe()
    common, rivals = trainer.common_facts(options)
    options = dataclasses.replace(options, dataset=common["dataset"])  # all sides train on what `auto` chose
    parts = {}
    with tempfile.TemporaryDirectory(prefix="tower_train-") as scratch:
        places = (pathlib.Path(scratch, str(number)) for number in itertools.count())
        for title, chosen in sides.parts(options, common, rivals).items():
            console.notice(f"{title}: {sides.counted(len(chosen), 'side')}")
            measured = measure.in_rounds(
                chosen,
                lambda side: measure.Worker(side, options, next(places)),
                options.num_rounds,
                options.seconds_each,
                options.start_together,
            )
            parts[title] = measure.compare(measured)
    content = {
        "options": dataclasses.asdict(options),
        "machine": machine,
        "common": common,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "parts": {title: [dataclasses.asdict(row) for row in rows] for title, rows in parts.items()},
    }
    path = write(out / ("sweep.json" if options.sweep else "benchmark.json"), content)
    rounds = sides.counted(options.num_rounds, "round")
    return [
        f"machine:  {machine['processor']}, {machine['cores']} cores, {', '.join(common['gpus']) or 'no GPU'}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        f"versions: {', '.join(f'{package} {version}' for package, version in machine['versions'].items())}",
        f"data:     {common['data']}",
        f"each:     {options.batch_size} examples a step, {rounds} of {options.seconds_each:g} s",
        *([f"*** {common['notice']}"] if common["notice"] else []),
        *itertools.chain.from_iterable(["", *_table(title, rows)] for title, rows in parts.items()),
        "",
        "examples/sec: median over rounds; ratio: to the first line, median of each round's; range: of these; "
        "first step: from the start of the process.",
        "",
        f"Written:  {', '.join(map(str, [path, *plots.draw(parts, path.with_suffix(''))]))}",
    ]


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


def _table(title: str, rows: Sequence[Result]) -> list[str]:
    """Tabulates the sides of a part."""
    head = [title, "examples/sec", "range", "ratio", "range", "peak memory", "first step"]
    on_gpus = any(row.card_bytes for row in rows)
    body = []
    for row in rows:
        memory, first_step = f"{row.peak_bytes / 2**20:.0f} MiB", f"{row.first_step_secs:.1f} s"
        cells = [row.side.title, *_median_and_range(row.rate, ".0f"), *_median_and_range(row.ratio, ".2f")]
        body.append([*cells, memory, first_step, *([f"{row.card_bytes / 2**20:.0f} MiB"] if on_gpus else [])])
    return markdown(head + (["of a GPU's memory"] if on_gpus else []), body)


def _median_and_range(figure: Figure, form: str) -> list[str]:
    return [f"{figure.median:{form}}", f"{figure.low:{form}} to {figure.high:{form}}"]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table whose first column is left-aligned and whose others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0]:<{widths[0]}}", *aligned[1:]]) + " |"

    return [line(head), line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]), *map(line, body)]
