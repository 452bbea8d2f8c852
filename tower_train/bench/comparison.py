"""The comparison and the sweep: benchmark.json or sweep.json with its figure, and the lines to print."""

import dataclasses
import itertools
import json
import pathlib
import tempfile
import time

from tower_train import console, errors, host
from tower_train.bench import measure, plots, report, results, sides, trainer
from tower_train.bench.sides import BenchmarkOptions


def run(options: BenchmarkOptions) -> list[str]:
    """Compares the sides part by part, each in rounds of its own. Raises SideError if one dies or hangs."""
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
            parts[title] = results.compare(measured, bool(common["gpus"]))
    rounds = sides.counted(options.num_rounds, "round")
    what = f"{options.batch_size} examples a step, {rounds} of {options.seconds_each:g} s"
    content = {
        "options": dataclasses.asdict(options),
        "machine": machine,
        "about": common,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "parts": {title: [dataclasses.asdict(row) for row in rows] for title, rows in parts.items()},
    }
    path = write(out / ("sweep.json" if options.sweep else "benchmark.json"), content)
    tables = itertools.chain.from_iterable(["", *report.table(title, rows)] for title, rows in parts.items())
    every_row = [row for rows in parts.values() for row in rows]
    drawn = plots.draw(parts, path.with_suffix(""))
    return [
        *report.opening(machine, common, what),
        *tables,
        "",
        *report.notes(every_row, common["flops_per_example"]),
        "",
        f"Written:  {', '.join(map(str, [path, *drawn]))}",
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
