"""Measuring: all sides live at once, and one of them does steps while the others stand still."""

import contextlib
import random
from collections.abc import Callable, Sequence

from tower_train import console, host
from tower_train.bench.processes import Worker
from tower_train.bench.results import Result
from tower_train.bench.sides import Side

_SPARE = 1.25  # the next process may need this times the largest so far


def in_rounds(
    sides: Sequence[Side],
    start: Callable[[Side], Worker],
    rounds: int,
    seconds: float,
    has_memory: Callable[[int], bool] = host.has_memory,
) -> list[Result]:
    """Measures every side `rounds` times, in an order that changes from round to round.

    If memory does not hold all sides at once they are measured in groups, each together with the first side and the
    ceilings, with which the others are compared.

    Args:
      sides: what to measure.
      start: starts a side's process.
      rounds: measurements of each side; the anchors have as many in every group.
      seconds: least duration of a measurement.
      has_memory: whether so many bytes of memory are free.

    Returns:
      The results, over sides.
    """
    results = [Result(side) for side in sides]
    anchors = [result for result in results if result is results[0] or result.side.is_ceiling]
    waiting = [result for result in results if result not in anchors]
    first_round, is_done = 0, False
    while not is_done:
        with contextlib.ExitStack() as stack:
            group, live = anchors + waiting, {}
            for result in group:
                needed = int(_SPARE * max(each.peak_bytes for each in results))
                if len(live) > len(anchors) and not has_memory(needed):
                    break
                worker = live[result.side.name] = stack.enter_context(start(result.side))
                result.add_start(worker.answer())
                console.notice(f"{result.side.title} is ready")
            group, waiting = group[: len(live)], group[len(live) :]
            for number in range(first_round, first_round + rounds):
                for result in random.Random(number).sample(group, len(group)):
                    result.add_round(number, live[result.side.name].measure(seconds))
                console.notice(f"round {number + 1} of {first_round + rounds} is done")
            for result in group:
                result.add_peaks(live[result.side.name].stop())
        first_round, is_done = first_round + rounds, not waiting
    return results
