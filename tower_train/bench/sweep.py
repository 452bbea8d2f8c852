"""Cost grows with the work and nothing else: examples/sec over batch size, tower count and the length of a run."""

import dataclasses
import statistics

from tower_train.bench import plot, results, rounds, systems, table
from tower_train.bench.session import Session

NAME = "sweep"
_BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of one tower
_STEPS, _LONG_RUN_BATCH = (200, 20_000), 8  # small steps, where what grows with the run would weigh most


def run(session: Session) -> list[str]:
    """Measures, writes sweep.json and sweep.png, and returns what to print."""
    options, on_gpus = session.options, bool(session.about["gpus"])
    parts = {
        "batch size, 1 tower": {size: systems.trainer(f"batch {size}", 1, size) for size in _BATCH_SIZES},
        f"towers, {options.batch_size} examples a step": {
            towers: systems.trainer(systems.count_of(towers, "tower"), towers, options.batch_size)
            for towers in options.tower_counts
            if not on_gpus or towers <= len(session.about["gpus"])
        },
        f"step, {_LONG_RUN_BATCH} examples each": {
            step: systems.trainer(f"from step {step} on", 1, _LONG_RUN_BATCH, warm_up_steps=step) for step in _STEPS
        },
    }
    sides = [side for part in parts.values() for side in part.values()]
    measured = rounds.measure(sides, session.start, options.num_rounds, session.progress, seconds=options.seconds_each)
    by_name = {one.side.name: one for one in measured}
    curves, lines = {}, []
    for axis, part in parts.items():
        found = {x: by_name[side.name] for x, side in part.items()}
        curves[axis] = {x: statistics.median(results.rates_by_round(one).values()) for x, one in found.items()}
        lines += ["", *table.sweep(axis, found)]
    written = [session.write(NAME, {"sides": [dataclasses.asdict(one) for one in measured]})]
    written += plot.sweep(curves, on_gpus, session.out / f"{NAME}.png")
    what = f"{options.num_rounds} rounds of {options.seconds_each:g} s, float32, real images"
    return [*table.opening(session.machine, session.about, what), *lines, "", *table.written(written)]
