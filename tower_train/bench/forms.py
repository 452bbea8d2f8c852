"""The forms of the benchmark that measure sides in turns: comparison and sweep.

Each measures, writes its files into the session's directory, and returns the lines to print.
"""

import dataclasses
import pathlib

from tower_train.bench import measure, plots, report, results, systems
from tower_train.bench.measure import Session

_SWEEP_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of one tower
_SWEEP_STEPS, _LONG_RUN_BATCH = (100, 1_000, 10_000), 8  # small steps, which show best what grows with the run


def compare(session: Session) -> list[str]:
    """Compares tower_train, its rivals and the ceiling: benchmark.json, .svg and .png; growing.json and so on."""
    options, about = session.options, session.about
    sides = systems.comparison(options, about)
    name, reference = ("growing", sides[0].name) if options.growing else ("benchmark", about["reference"])
    measured = measure.in_rounds(session, sides, options.num_rounds, options.seconds_each)
    rows = results.rows(measured, reference, about["flops_per_example"], on_gpus=bool(about["gpus"]))
    content = {"reference": reference, "parts": [], "rows": _as_dicts(rows), "sides": _as_dicts(measured)}
    return show(session.write(name, content))


def sweep(session: Session) -> list[str]:
    """Measures examples/sec over batch size, tower count and the length of a run: sweep.json, .svg and .png."""
    options, gpus = session.options, session.about["gpus"]
    batch_sizes = {size: systems.trainer(f"batch {size}", 1, size) for size in _SWEEP_BATCH_SIZES}
    towers = {
        count: systems.trainer(systems.count_of(count, "tower"), count, options.batch_size)
        for count in options.tower_counts
        if not gpus or count <= len(gpus)
    }
    steps = {
        step: systems.trainer(f"from step {step} on", 1, _LONG_RUN_BATCH, warm_up_steps=step) for step in _SWEEP_STEPS
    }
    parts = [
        ("batch size", "Batch size, 1 tower", batch_sizes),
        ("towers", f"Towers, {options.batch_size} examples a step", towers),
        ("step", f"Length of a run, {_LONG_RUN_BATCH} examples a step", steps),
    ]
    sides = [side for _, _, points in parts for side in points.values()]
    measured = measure.in_rounds(session, sides, options.num_rounds, options.seconds_each)
    named = [
        {"axis": axis, "title": title, "points": {x: side.name for x, side in points.items()}}
        for axis, title, points in parts
    ]
    return show(session.write("sweep", {"reference": None, "parts": named, "sides": _as_dicts(measured)}))


def show(path: pathlib.Path) -> list[str]:
    """Returns the tables of a comparison or a sweep; draws its figures beside its file."""
    found = results.read(path)
    tables = report.sweep(found) if found.parts else report.comparison(found)
    return [*tables, "", *report.written([path, *plots.draw(found, path.with_suffix(""))])]


def _as_dicts(records) -> list[dict]:
    return [dataclasses.asdict(record) for record in records]
