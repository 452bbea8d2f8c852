"""The costs of a run besides its steps, `--overhead`: reports, the check of each step, and the start.

A machine's speed changes by more than these costs within seconds, so each is measured beside the same without it, as
close by as possible. Reports, which are log lines, summaries and checkpoints, come more often than by default, and a
short block of steps that begins with some of them is compared with the blocks before and after it, which have none. The
median over many blocks tells what a report costs; divided by the steps between two of its kind it is the cost at the
defaults.
"""

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from tower_train.bench import measure, report, systems
from tower_train.bench.measure import Session
from tower_train.bench.progress import START_SECS, STARTING
from tower_train.config import Config

KINDS = tuple(systems.REPORT_STEPS)  # from the most frequent on: each comes only along with those before it
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config) if field.name in KINDS}
_TITLES = "log lines", "summaries", "checkpoints"
_BLOCK = systems.REPORT_STEPS[KINDS[0]] // 2  # steps
_STEPS, _ROUNDS = 360, 5  # of reports
_TURN_STEPS, _TURNS_EACH = 10, 8  # of the check, for each of those rounds
_RESAMPLES, _CERTAINTY = 1000, 0.95
_STARTS, _PAIR_SECS = 5, 1.5 * START_SECS
_IMPORT = "import time; start = time.perf_counter(); import tensorflow; print(time.perf_counter() - start)"


@dataclasses.dataclass(frozen=True)
class Cost:
    """A share of the time of steps.

    Attributes:
      median: of what was measured.
      low, high: where the true median lies with a certainty of 95 % (bootstrap: Efron 1979, percentiles).
    """

    median: float
    low: float
    high: float


def overhead(session: Session) -> list[str]:
    """Measures the costs of reports at their defaults, of the check of each step and of the start: overhead.json."""
    options, rounds = session.options, session.options.rounds or _ROUNDS
    reporting, unguarded, silent = (
        systems.trainer(reports, 1, options.batch_size, reports=reports)
        for reports in (systems.REPORTS, systems.UNGUARDED, systems.SILENCE)
    )
    counts = sorted({min(options.tower_counts), max(options.tower_counts)})
    session.progress.expect(STARTING, (1 + len(counts)) * (options.rounds or _STARTS) * _PAIR_SECS)
    measured = measure.in_rounds(session, [reporting], rounds, steps=_STEPS, each=True)
    measured += measure.in_rounds(session, [unguarded, silent], rounds * _TURNS_EACH, steps=_TURN_STEPS)
    extra = extra_steps((sample["first"], sample["step_secs"]) for sample in measured[0].samples)
    costs = costs_of_reports(extra, DEFAULTS)
    without, with_it = (one.rates() for one in measured[1:])
    check = median_cost([without[number] / with_it[number] - 1 for number in without])
    starts = {systems.count_of(towers, "tower"): _starts(session, towers) for towers in counts}
    written = session.write("overhead", {
        "extra_steps": extra, "costs": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
        "check": dataclasses.asdict(check), "starts": starts,
        "sides": [dataclasses.asdict(one) for one in measured],
    })  # fmt: skip
    return [
        *report.opening(session.machine, session.about, f"{options.batch_size} examples a step, one tower"), "",
        *report.markdown(
            ["cost", "of the time of steps", f"from, with {_CERTAINTY:.0%} certainty", "to"],
            [_row(name, cost) for name, cost in (costs | {"the check that each step is finite": check}).items()],
        ), "",
        f"Reports come every {', '.join(str(DEFAULTS[kind]) for kind in KINDS)} steps by default. Measured: "
        f"{sum(map(len, extra))} blocks of {_BLOCK} steps with reports, each beside two without; the check in "
        f"{len(without)} pairs of {_TURN_STEPS} steps.",
        *(_start_line(name, pairs) for name, pairs in starts.items()), "",
        *report.written([written]),
    ]  # fmt: skip


def extra_steps(samples) -> list[list[float]]:
    """Returns the costs of reports, in steps without any: for each kind those that came with all kinds before it.

    Args:
      samples: (number of the first step, seconds of each step) of steps in a row.
    """
    extra: list[list[float]] = [[] for _ in KINDS]
    for first, secs in samples:
        begin = -first % (2 * _BLOCK) + 2 * _BLOCK
        for place in range(begin, len(secs) - 2 * _BLOCK + 1, 2 * _BLOCK):
            before, own, after = (sum(secs[i : i + _BLOCK]) for i in (place - _BLOCK, place, place + _BLOCK))
            kinds = sum((first + place) % every == 0 for every in systems.REPORT_STEPS.values())
            extra[kinds - 1].append(_BLOCK * (2 * own / (before + after) - 1))
    return extra


def costs_of_reports(extra: Sequence[Sequence[float]], every: Mapping[str, int]) -> dict[str, Cost]:
    """The share of the time of steps that each kind of reports costs, and all of them.

    Args:
      extra: from `extra_steps`.
      every: {kind: steps between two reports}.
    """
    generator = np.random.default_rng(0)
    medians = [_medians(costs, generator) for costs in extra]  # over kinds: the median, and those of resamples
    alone = np.diff([np.zeros_like(medians[0]), *medians], axis=0)
    shares = [costs / every[kind] for kind, costs in zip(KINDS, alone, strict=True)]
    costs = {title: _cost(share) for title, share in zip(_TITLES, shares, strict=True)}
    return costs | {"all of these": _cost(sum(shares))}


def median_cost(costs: Sequence[float]) -> Cost:
    """The median of costs that are shares of the time of steps."""
    return _cost(_medians(costs, np.random.default_rng(0)))


def _medians(values: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """The median, then those of resamples; [1 + _RESAMPLES]."""
    resamples = generator.choice(values, (_RESAMPLES, len(values)))
    return np.concatenate([[np.median(values)], np.median(resamples, axis=1)])


def _cost(medians: np.ndarray) -> Cost:
    rest = (1 - _CERTAINTY) / 2
    return Cost(*map(float, (medians[0], *np.quantile(medians[1:], [rest, 1 - rest]))))


def _row(name: str, cost: Cost) -> list[str]:
    return [name, f"{cost.median:.2%}", f"{cost.low:.2%}", f"{cost.high:.2%}"]


def _starts(session: Session, towers: int) -> list[dict[str, float]]:
    """Returns seconds of `import tensorflow`, by itself in a process of its own, and of a process of tower_train from
    its start to the end of its first step, one right after the other."""
    side = systems.trainer("start", towers, session.options.batch_size)
    pairs, count = [], session.options.rounds or _STARTS
    for number in range(count):
        with session.progress.work(STARTING, _PAIR_SECS, "starting"):
            of_import = import_secs()
            with session.start(side) as worker:
                first = worker.wait_for("first_step")
        pairs.append({"import_secs": of_import, "first_step_secs": first["secs"]})
        session.progress.note(f"start {number + 1} of {count} of {systems.count_of(towers, 'tower')}")
    return pairs


def import_secs() -> float:
    """Returns the seconds that `import tensorflow` takes in a process that does nothing else."""
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout)


def _start_line(name: str, pairs: Sequence[Mapping[str, float]]) -> str:
    ratios = [pair["first_step_secs"] / pair["import_secs"] for pair in pairs]
    first, of_import = (statistics.median(pair[key] for pair in pairs) for key in ("first_step_secs", "import_secs"))
    return (
        f"first step of {name}: {first:.1f} s after the start of the process, {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) times what `import tensorflow` takes by itself ({of_import:.1f} s)."
    )
