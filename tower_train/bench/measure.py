"""Measuring: all sides live at once, and one of them does steps while the others stand still."""

import contextlib
import dataclasses
import itertools
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from tower_train import console, host
from tower_train.bench import results
from tower_train.bench.processes import Worker
from tower_train.bench.progress import MEASURING, START_SECS, STARTING, STEP_SECS, Progress
from tower_train.bench.results import Measured
from tower_train.bench.systems import BenchmarkOptions, System, count_of

_SPARE = 1.25  # the next process may need this times the largest so far


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of the benchmark.

    Attributes:
      out: the directory of the results.
      machine: `host.describe` at the beginning.
      about: workload, data and devices, from `sides.describe`.
      start: starts a side's process, with an empty place for its files.
      progress: reports the progress.
    """

    options: BenchmarkOptions
    out: pathlib.Path
    machine: dict
    about: dict
    start: Callable[[System], Worker]
    progress: Progress

    def write(self, name: str, content: dict) -> pathlib.Path:
        """Writes results, with the machine and the data, into NAME.json; returns its path."""
        measured_on = {"options": dataclasses.asdict(self.options), "machine": self.machine, "about": self.about}
        measured_on["date"] = time.strftime("%Y-%m-%d %H:%M")
        return results.write(self.out / f"{name}.json", measured_on | content)


@contextlib.contextmanager
def session(options: BenchmarkOptions) -> Iterator[Session]:
    """Finds out what there is to measure; removes temporary files at the end. Raises ConfigError if the directory for
    results cannot be made, and SideError if data or workload cannot be used."""
    out, here = results.directory(options.out), host.describe()
    with tempfile.TemporaryDirectory(prefix="tower_train-") as scratch, Progress() as progress:
        places = (pathlib.Path(scratch, str(number)) for number in itertools.count())
        common = {name: getattr(options, name) for name in ("workload", "model", "dataset", "data_dir", "device")}
        common["fixed_path"] = str(pathlib.Path(scratch, "fixed"))
        console.notice("looking at data and devices")
        spec = common | {"kind": "describe", "batch_size": options.batch_size}
        with (
            progress.work(STARTING, START_SECS, "looking at data and devices"),
            Worker(f"workload {options.workload}", spec, next(places), options.timeout_secs) as worker,
        ):
            about = worker.wait_for("described")
        common["dataset"] = about["dataset"]  # all sides train on what `auto` chose

        def start(side: System) -> Worker:
            place = next(places)
            own = {"name": side.name, "kind": side.kind, "batch_size": side.batch_size, "scratch": str(place)}
            return Worker(side.name, common | side.settings | own, place, options.timeout_secs)

        yield Session(options, out, here, about, start, progress)


def in_rounds(
    session: Session,
    sides: Sequence[System],
    rounds: int,
    seconds: float = 0.0,
    steps: int = 1,
    each: bool = False,
    has_memory: Callable[[int], bool] = host.has_memory,
) -> list[Measured]:
    """Measures every side `rounds` times, in an order that changes from round to round; returns them in the given one.

    If memory does not hold all sides at once they are measured in groups, each together with the anchors, with which
    the others are compared.

    Args:
      session: starts the sides; its progress reports every start and every round.
      rounds: measurements of each side; the anchors have as many in every group.
      seconds: least duration of a measurement.
      steps: least number of steps of a measurement.
      each: whether samples have the duration of each step.
      has_memory: whether so many bytes of memory are free.
    """
    measured = {side.name: Measured(side) for side in sides}
    anchors = [side for side in sides if side.is_anchor]
    waiting = [side for side in sides if not side.is_anchor]
    progress, secs_each = session.progress, max(seconds, steps * STEP_SECS)
    progress.expect(STARTING, sum(map(_start_secs, sides)))
    progress.expect(MEASURING, len(sides) * rounds * secs_each)
    progress.announce(f"measuring {count_of(len(sides), 'system')} in {count_of(rounds, 'round')}")
    first_round = 0
    while first_round == 0 or waiting:
        if first_round:
            progress.expect(STARTING, sum(map(_start_secs, anchors)))
            progress.expect(MEASURING, len(anchors) * rounds * secs_each)
        with contextlib.ExitStack() as stack:
            live, waiting = {}, anchors + waiting
            while waiting and (len(live) <= len(anchors) or has_memory(_memory_of_next(measured))):
                side = waiting.pop(0)
                with progress.work(STARTING, _start_secs(side), f"starting {side.title}"):
                    live[side.name] = stack.enter_context(session.start(side))
                    _note_start(measured[side.name], live[side.name])
                progress.note(f"{side.title} is ready")
            for number in range(first_round, first_round + rounds):
                for name in random.Random(number).sample(list(live), len(live)):
                    with progress.work(MEASURING, secs_each, f"round {number + 1}"):
                        _take_sample(measured[name], live[name], number, seconds, steps, each)
                progress.note(f"round {number + 1} is done")
            for name, worker in live.items():
                _note_peaks(measured[name], worker.stop())
        first_round += rounds
    return list(measured.values())


def _start_secs(side: System) -> float:
    return START_SECS + STEP_SECS * side.settings.get("warm_up_steps", 0)


def _memory_of_next(measured: dict[str, Measured]) -> int:
    return int(_SPARE * max(one.peak_bytes for one in measured.values()))


def _note_start(measured: Measured, worker: Worker) -> None:
    first = worker.wait_for("first_step")
    ready = worker.wait_for("ready")
    measured.first_step_secs = measured.first_step_secs or first["secs"]  # the first of an anchor's starts
    measured.import_secs = measured.import_secs or first["import_secs"]
    measured.work_per_step = ready["work_per_step"]
    _note_peaks(measured, ready)


def _note_peaks(measured: Measured, answer: dict) -> None:
    measured.peak_bytes = max(measured.peak_bytes, answer["peak_bytes"])
    measured.card_bytes = max(measured.card_bytes, *answer["card_bytes"], 0)


def _take_sample(measured: Measured, worker: Worker, number: int, seconds: float, steps: int, each: bool) -> None:
    answer = worker.measure(seconds, steps, each)
    del answer["event"], answer["secs"]
    per_sec = answer["steps"] * measured.work_per_step / answer["seconds"]
    measured.samples.append({"round": number, "per_sec": per_sec} | answer)
