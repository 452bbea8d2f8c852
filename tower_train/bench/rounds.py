"""Measuring: the sides live side by side; one of them does steps while the others stand still."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence

from tower_train import host
from tower_train.bench.processes import Worker
from tower_train.bench.progress import Progress
from tower_train.bench.systems import System

START_SECS = 8.0  # about what starting a side takes, for the progress bar
_SPARE = 1.25  # the next process may need this times what the largest so far does


@dataclasses.dataclass
class Measured:
    """What came out for one side; all of it goes to benchmark.json.

    Attributes:
      side: which one.
      first_step_secs: from the start of its process to the end of its first step.
      import_secs: what importing TensorFlow took of that.
      work_per_step: examples, or for a ceiling floating-point operations.
      peak_bytes: resident memory at its peak.
      samples: one a round, with round, steps, seconds, per_sec (work per second) and what else the worker says.
    """

    side: System
    first_step_secs: float = 0.0
    import_secs: float = 0.0
    work_per_step: int = 0
    peak_bytes: int = 0
    samples: list[dict] = dataclasses.field(default_factory=list)


def measure(
    sides: Sequence[System],
    start: Callable[[System], Worker],
    rounds: int,
    progress: Progress,
    seconds: float = 0.0,
    steps: int = 1,
    has_room: Callable[[int], bool] | None = None,
) -> list[Measured]:
    """Measures every side `rounds` times, in an order that changes from round to round.

    Where memory does not hold all sides at once they are measured in groups, each together with the anchors, which the
    others are compared with.

    Args:
      sides: what to measure.
      start: starts a side's worker.
      rounds: how often each side is measured; the anchors as often in every group.
      progress: told of every start and every measurement.
      seconds, steps: how long at least, and how many steps at least, each measurement is.
      has_room: whether so many bytes of memory are free; None asks the machine.

    Returns:
      In the order of `sides`.
    """
    found = {side.name: Measured(side) for side in sides}
    anchors = [side for side in sides if side.is_anchor]
    waiting = [side for side in sides if not side.is_anchor]
    progress.expect(len(sides) * (START_SECS + rounds * seconds))
    first_round = 0
    while first_round == 0 or waiting:
        with contextlib.ExitStack() as stack:
            live, queue = {}, anchors + waiting
            while queue and (len(live) <= len(anchors) or (has_room or memory_holds)(_largest(found))):
                side = queue.pop(0)
                progress.show(f"starting {side.name}")
                live[side.name] = stack.enter_context(start(side))
                _note_start(found[side.name], live[side.name])
                progress.advance(START_SECS)
            waiting = queue
            for number in range(first_round, first_round + rounds):
                progress.show(f"round {number + 1}")
                for name in random.Random(number).sample(list(live), len(live)):
                    _take_sample(found[name], live[name], number, seconds, steps)
                    progress.advance(seconds)
            for name, worker in live.items():
                found[name].peak_bytes = max(found[name].peak_bytes, worker.stop()["peak_bytes"])
        first_round += rounds
    return list(found.values())


def memory_holds(num_bytes: int) -> bool:
    """Whether this machine has so much memory to give; True if it does not tell."""
    free = host.free_memory()
    return free is None or free >= num_bytes


def _largest(found: dict[str, Measured]) -> int:
    return int(_SPARE * max(measured.peak_bytes for measured in found.values()))


def _note_start(measured: Measured, worker: Worker) -> None:
    first = worker.wait_for("first_step")
    ready = worker.wait_for("ready")
    measured.first_step_secs = measured.first_step_secs or first["secs"]  # of an anchor's starts, the first
    measured.import_secs = measured.import_secs or first["import_secs"]
    measured.work_per_step, measured.peak_bytes = ready["work_per_step"], ready["peak_bytes"]


def _take_sample(measured: Measured, worker: Worker, number: int, seconds: float, steps: int) -> None:
    answer = worker.measure(seconds, steps)
    del answer["event"], answer["secs"]
    per_sec = answer["steps"] * measured.work_per_step / answer["seconds"]
    measured.samples.append({"round": number, "per_sec": per_sec} | answer)
