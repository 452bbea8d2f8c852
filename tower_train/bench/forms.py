"""The forms of the benchmark that measure sides in turns: comparison, sweep, overhead.

Each measures, writes its files into the session's directory, and returns the lines to print.
"""

import dataclasses
import importlib.util
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence

from tower_train.bench import measure, report, systems
from tower_train.bench.measure import Session

_SWEEP_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of one tower
_SWEEP_STEPS, _LONG_RUN_BATCH = (200, 20_000), 8  # small steps, which show best what grows with the run
_OVERHEAD_STEPS, _OVERHEAD_ROUNDS = 500, 4  # 2000 steps, in pieces with as many log lines, summaries and checkpoints
_STARTS = 5

_COLORS = {systems.TRAINER: "tab:blue", systems.CEILING: "tab:gray"}
_RIVAL_COLOR = "tab:orange"
_TOWERS = re.compile(rf"{systems.TRAINER}/(\d+) towers?/(.+)")


def compare(session: Session) -> list[str]:
    """Compares tower_train, its rivals and the ceiling: benchmark.json and .png; growing.json and .png."""
    options, about = session.options, session.about
    sides = systems.comparison(options, about)
    name, reference = ("growing", sides[0].name) if options.growing else ("benchmark", about["reference"])
    measured = measure.in_rounds(session, sides, options.num_rounds, options.seconds_each)
    rows = report.rows(measured, reference, about["flops_per_example"], on_gpus=bool(about["gpus"]))
    written = [session.write(name, {"rows": _as_dicts(rows), "sides": _as_dicts(measured)})]
    written += draw_comparison(rows, bool(about["gpus"]), session.out / f"{name}.png")
    what = f"{options.batch_size} examples a step, {options.num_rounds} rounds of {options.seconds_each:g} s"
    return [
        *report.opening(session.machine, about, what), "",
        *report.comparison(rows, reference), "",
        *report.notes(measured, about["flops_per_example"]), "",
        *report.written(written),
    ]  # fmt: skip


def sweep(session: Session) -> list[str]:
    """Measures examples/sec over batch size, tower count and the length of a run: sweep.json and .png."""
    options, gpus = session.options, session.about["gpus"]
    parts = {
        "batch size, 1 tower": {size: systems.trainer(f"batch {size}", 1, size) for size in _SWEEP_BATCH_SIZES},
        f"towers, {options.batch_size} examples a step": {
            towers: systems.trainer(systems.count_of(towers, "tower"), towers, options.batch_size)
            for towers in options.tower_counts
            if not gpus or towers <= len(gpus)
        },
        f"step, {_LONG_RUN_BATCH} examples each": {
            step: systems.trainer(f"from step {step} on", 1, _LONG_RUN_BATCH, warm_up_steps=step)
            for step in _SWEEP_STEPS
        },
    }
    sides = [side for part in parts.values() for side in part.values()]
    measured = measure.in_rounds(session, sides, options.num_rounds, options.seconds_each)
    by_name = {one.side.name: one for one in measured}
    curves, lines = {}, []
    for axis, part in parts.items():
        points = {x: by_name[side.name] for x, side in part.items()}
        curves[axis] = {x: statistics.median(one.rates().values()) for x, one in points.items()}
        lines += ["", *report.sweep(axis, points)]
    written = [session.write("sweep", {"sides": _as_dicts(measured)})]
    written += draw_sweep(curves, bool(gpus), session.out / "sweep.png")
    what = f"{options.num_rounds} rounds of {options.seconds_each:g} s, float32, real images"
    return [*report.opening(session.machine, session.about, what), *lines, "", *report.written(written)]


def overhead(session: Session) -> list[str]:
    """Measures the costs of a run besides its steps, reports at their defaults and the start: overhead.json."""
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
    """Puts the cost of something into words, from the rates of the same rounds without and with it."""
    costs = [without[number] / with_it[number] - 1 for number in without]
    median, low, high = report.median_and_quartiles(costs)
    spread = f"{low:.1%} to {high:.1%} between the quartiles of {len(costs)} pieces"
    return f"{median:.1%} of {_OVERHEAD_STEPS * len(costs)} steps ({spread})"


def _starts(session: Session, side: systems.System) -> tuple[list[float], list[float]]:
    """Returns by start the seconds of importing TensorFlow, and from the process's start to a side's first step."""
    firsts = []
    count = session.options.rounds or _STARTS
    session.progress.expect(count * measure.START_SECS)
    session.progress.update(doing="starting")
    for _ in range(count):
        with session.start(side) as worker:
            firsts.append(worker.wait_for("first_step"))
        session.progress.update(advance=measure.START_SECS)
    return [first["import_secs"] for first in firsts], [first["secs"] for first in firsts]


def draw_comparison(rows: Sequence[report.Row], on_gpus: bool, path: pathlib.Path) -> list[pathlib.Path]:
    """Draws throughput by system, and over towers beside perfect scaling; returns the paths written, none without
    matplotlib."""
    figure = _figure(13, 1.5 + 0.3 * len(rows))
    if not figure or not rows:
        return []
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    places = range(len(rows), 0, -1)
    colors = [_COLORS.get(row.name.partition("/")[0], _RIVAL_COLOR) for row in rows]
    spreads = [[row.per_sec - row.low for row in rows], [row.high - row.per_sec for row in rows]]
    bars = left.barh(places, [row.per_sec for row in rows], xerr=spreads, color=colors, error_kw={"ecolor": "0.3"})
    left.bar_label(bars, [f"{row.per_sec:.0f}" for row in rows], padding=3)
    left.set_yticks(places, [row.name for row in rows])
    left.set_xlim(0, 1.12 * max(row.high for row in rows))
    left.set(xlabel="examples/sec (median, quartiles)", title="Throughput by system")
    if scaling := _scaling(rows):
        _draw_curves(right, scaling, "towers, at one global batch", on_gpus)
    else:
        right.set_axis_off()
    return _save(figure, path)


def draw_sweep(curves: Mapping[str, Mapping[int, float]], on_gpus: bool, path: pathlib.Path) -> list[pathlib.Path]:
    """Draws a panel for each curve, {label of x: {x: examples/sec}}; returns paths as `draw_comparison`."""
    figure = _figure(5 * len(curves), 4)
    if not figure:
        return []
    for axis, (name, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        _draw_curves(axis, {"measured": curve}, name, on_gpus)
    return _save(figure, path)


def perfect_scaling(by_towers: Mapping[int, float], on_gpus: bool) -> list[float]:
    """Returns the throughput at each tower count if more towers cost nothing, from that of the fewest.

    It grows with the number of GPUs. For logical CPU devices it is constant: one tower keeps all cores busy.
    """
    fewest = min(by_towers)
    return [by_towers[fewest] * (towers / fewest if on_gpus else 1) for towers in by_towers]


def _draw_curves(axis, curves: Mapping[str, Mapping[int, float]], xlabel: str, on_gpus: bool) -> None:
    """Draws {label: {x: examples/sec}} over powers of two or so; curves over towers with perfect scaling."""
    for label, curve in curves.items():
        (line,) = axis.plot(list(curve), list(curve.values()), "o-", label=label)
        if xlabel.startswith("towers"):
            axis.plot(list(curve), perfect_scaling(curve, on_gpus), ":", color=line.get_color())
            axis.set_title("Against perfect scaling (dotted)")
            axis.legend()
    xs = sorted(set().union(*curves.values()))
    axis.set_xscale("log", base=2)
    axis.set_xticks(xs, [f"{x:,}" for x in xs])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * axis.dataLim.ymax)
    axis.set(xlabel=xlabel, ylabel="examples/sec")


def _scaling(rows: Sequence[report.Row]) -> dict[str, dict[int, float]]:
    """Returns {dtype and inputs: {towers: examples/sec}} of all sides measured with several tower counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if match := _TOWERS.fullmatch(row.name):
            found.setdefault(match[2], {})[int(match[1])] = row.per_sec
    return {name: by_towers for name, by_towers in found.items() if len(by_towers) > 1}


def _figure(width: float, height: float):
    """Returns a new figure, in inches, that needs no display; None without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return None
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _save(figure, path: pathlib.Path) -> list[pathlib.Path]:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return [path]
