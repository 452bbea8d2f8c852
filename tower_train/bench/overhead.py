"""What a run pays besides its steps: reports at their defaults, and the start."""

import dataclasses
import statistics
import subprocess
import sys
import time

from tower_train.bench import results, rounds, systems, table
from tower_train.bench.session import Session

NAME = "overhead"
_STEPS, _ROUNDS = 500, 4  # 2000 steps, in pieces that each hold as many log lines, summaries and checkpoints
_STARTS = 5


def run(session: Session) -> list[str]:
    """Measures, writes overhead.json, and returns what to print."""
    options = session.options
    kinds = (systems.UNGUARDED, systems.SILENCE, systems.REPORTS)
    sides = [systems.trainer(reports, 1, options.batch_size, reports=reports) for reports in kinds]
    measured = rounds.measure(sides, session.start, options.rounds or _ROUNDS, session.progress, steps=_STEPS)
    unguarded, silent, with_reports = (results.rates_by_round(one) for one in measured)
    imports, starts = _starts(session, sides[0])
    written = session.write(
        NAME,
        {"sides": [dataclasses.asdict(one) for one in measured], "import_secs": imports, "first_step_secs": starts},
    )
    ratio = statistics.median(start / of_import for start, of_import in zip(starts, imports, strict=True))
    return [
        *table.opening(session.machine, session.about, f"{options.batch_size} examples a step"), "",
        f"log lines, summaries and checkpoints at their defaults cost {_cost(silent, with_reports)}.",
        f"they and the check that each step is finite cost {_cost(unguarded, with_reports)}.",
        f"first step: {statistics.median(starts):.1f} s after the start, {ratio:.2f} times what `import tensorflow` "
        f"takes by itself ({statistics.median(imports):.1f} s).", "",
        *table.written([written]),
    ]  # fmt: skip


def _cost(without: dict[int, float], with_it: dict[int, float]) -> str:
    """What something costs, in words, from the rates of the same rounds without and with it."""
    costs = [without[number] / with_it[number] - 1 for number in without]
    low, high = results.quartiles(costs)
    spread = f"{low:.1%} to {high:.1%} between the quartiles of {len(costs)} pieces"
    return f"{statistics.median(costs):.1%} of {_STEPS * len(costs)} steps ({spread})"


def _starts(session: Session, side: systems.System) -> tuple[list[float], list[float]]:
    """Seconds from a process's start to its end if it imports TensorFlow only, and to a side's first step, in turns."""
    imports, starts = [], []
    count = session.options.rounds or _STARTS
    session.progress.expect(count * rounds.START_SECS)
    for _ in range(count):
        session.progress.show("starting")
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import tensorflow"], check=True, capture_output=True)
        imports.append(time.perf_counter() - begin)
        with session.start(side) as worker:
            starts.append(worker.wait_for("first_step")["secs"])
        session.progress.advance(rounds.START_SECS)
    return imports, starts
