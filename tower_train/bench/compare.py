"""The comparison side by side: what `python -m tower_train.benchmark` shows unless another form is asked for; with
--growing of other sides."""

import dataclasses

from tower_train.bench import plot, results, rounds, systems, table
from tower_train.bench.session import Session


def run(session: Session) -> list[str]:
    """Measures, writes benchmark.json and benchmark.png (growing.json, .png), and returns what to print."""
    options, about = session.options, session.about
    sides = systems.comparison(options, about)
    name, reference = ("growing", sides[0].name) if options.growing else ("benchmark", about["reference"])
    measured = rounds.measure(sides, session.start, options.num_rounds, session.progress, seconds=options.seconds_each)
    rows = results.rows(measured, reference, about["flops_per_example"])
    content = {"rows": [dataclasses.asdict(row) for row in rows], "sides": [dataclasses.asdict(m) for m in measured]}
    written = [session.write(name, content)]
    written += plot.comparison(rows, bool(about["gpus"]), session.out / f"{name}.png")
    what = f"{options.batch_size} examples a step, {options.num_rounds} rounds of {options.seconds_each:g} s"
    return [
        *table.opening(session.machine, about, what), "",
        *table.comparison(rows, reference), "",
        *table.notes(measured, about["flops_per_example"]), "",
        *table.written(written),
    ]  # fmt: skip
