"""The forms of the benchmark that measure sides in turns: comparison, sweep, overhead.

Each measures, writes its files into the session's directory, and returns the lines to print.
"""

import dataclasses
import pathlib
import statistics

from tower_train.bench import measure, plots, report, results, systems
from tower_train.bench.measure import Session
from tower_train.bench.progress import START_SECS, STARTING

_SWEEP_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of one tower
_SWEEP_STEPS, _LONG_RUN_BATCH = (100, 1_000, 10_000), 8  # small steps: anything that grows with the run weighs most
_OVERHEAD_STEPS, _OVERHEAD_ROUNDS = 500, 4  # 2000 steps, in pieces with as many log lines, summaries and checkpoints
_STARTS = 5


def compare(session: Session) -> list[str]:
    """tower_train, its rivals and the ceiling side by side: benchmark.json, .svg and .png; growing.json and so on."""
    options, about = session.options, session.about
    sides = systems.comparison(options, about)
    name, reference = ("growing", sides[0].name) if options.growing else ("benchmark", about["reference"])
    measured = measure.in_rounds(session, sides, options.num_rounds, options.seconds_each)
    rows = results.rows(measured, reference, about["flops_per_example"], on_gpus=bool(about["gpus"]))
    content = {"reference": reference, "parts": [], "rows": _as_dicts(rows), "sides": _as_dicts(measured)}
    return show(session.write(name, content))


def sweep(session: Session) -> list[str]:
    """Examples/sec over batch size, tower count and the length of a run: sweep.json, .svg and .png."""
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
    """The tables of a comparison or a sweep, whose figures are drawn beside its file."""
    found = results.read(path)
    tables = report.sweep(found) if found.parts else report.comparison(found)
    return [*tables, "", *report.written([path, *plots.draw(found, path.with_suffix(""))])]


def overhead(session: Session) -> list[str]:
    """The costs of a run besides its steps, reports at their defaults and the start: overhead.json."""
    options = session.options
    kinds = (systems.UNGUARDED, systems.SILENCE, systems.REPORTS)
    sides = [systems.trainer(reports, 1, options.batch_size, reports=reports) for reports in kinds]
    measured = measure.in_rounds(session, sides, options.rounds or _OVERHEAD_ROUNDS, steps=_OVERHEAD_STEPS)
    unguarded, silent, with_reports = (one.rates() for one in measured)
    imports, starts = _starts(session, sides[0])
    content = {"sides": _as_dicts(measured), "import_secs": imports, "first_step_secs": starts}
    written = session.write("overhead", content)
    ratio = statistics.median(start / of_import for start, of_import in zip(starts, imports, strict=True))
    return [
        *report.opening(session.machine, session.about, f"{options.batch_size} examples a step"), "",
        f"log lines, summaries and checkpoints at their defaults cost {_cost(silent, with_reports)}.",
        f"they and the check that each step is finite cost {_cost(unguarded, with_reports)}.",
        f"first step: {statistics.median(starts):.1f} s after the start, {ratio:.2f} times what `import tensorflow` "
        f"takes of that ({statistics.median(imports):.1f} s).", "",
        *report.written([written]),
    ]  # fmt: skip


def _as_dicts(records) -> list[dict]:
    return [dataclasses.asdict(record) for record in records]


def _cost(without: dict[int, float], with_it: dict[int, float]) -> str:
    """The cost of something, in words, from the rates of the same rounds without and with it."""
    costs = [without[number] / with_it[number] - 1 for number in without]
    median, low, high = results.median_and_quartiles(costs)
    spread = f"{low:.1%} to {high:.1%} between the quartiles of {len(costs)} pieces"
    return f"{median:.1%} of {_OVERHEAD_STEPS * len(costs)} steps ({spread})"


def _starts(session: Session, side: systems.System) -> tuple[list[float], list[float]]:
    """Seconds that importing TensorFlow takes, and seconds from a process's start to a side's first step, by start."""
    firsts = []
    count = session.options.rounds or _STARTS
    session.progress.expect(STARTING, count * START_SECS)
    for number in range(count):
        with session.progress.work(STARTING, START_SECS, "starting"), session.start(side) as worker:
            firsts.append(worker.wait_for("first_step"))
        session.progress.note(f"start {number + 1} of {count}")
    return [first["import_secs"] for first in firsts], [first["secs"] for first in firsts]
