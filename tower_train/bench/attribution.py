"""Parts of a step's time, from a trace of its operations, and the obstacle to more towers."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

from tower_train.bench import comparison, sides

INPUT_WAIT, NOTHING = "input wait", "no operation running"
_INPUT = re.compile(r"(input/)?(next_batch/.*)?Iterator")
_TOWER = re.compile(r"tower_\d+$")
_BY_OPTIMIZERS = re.compile(r"^(ConstantFolding/|GroupCrossDeviceControlEdges_\d+/|Func/)+")
_NOTICEABLE = 0.05  # of a step
_SHOWN = 0.005  # of a step, from which a name scope has a line
_BUSY = 0.85  # of the cores: threads that sometimes wait for each other never all work


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of one step: name, device, and start and end in seconds."""

    name: str
    device: str
    start: float
    end: float

    @property
    def part(self) -> str:
        """The part of the step that it belongs to: its outermost name scope, such as 'tower_0', or INPUT_WAIT."""
        name = _BY_OPTIMIZERS.sub("", self.name)
        return INPUT_WAIT if _INPUT.match(name) else name.partition("/")[0]


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The time of a step by part."""

    towers: int
    on_gpus: bool  # whether each tower has its own device; logical CPU devices share the cores
    cores: int
    step_secs: float  # a step's time, without tracing
    busy: float  # share of the cores in use meanwhile, 0 to 1
    busy_here: float  # share of the cores in use by this process, 0 to 1
    in_place_secs: float  # a step's time, without tracing, with its input in place
    seconds: dict[str, float]  # by part, of a traced step; together they are its duration

    @property
    def input_share(self) -> float:
        """The share of a traced step that only waits for input or, if larger, the share that GPUs save with input in
        place.

        Tracing slows their steps down, which hides slow input. On CPUs towers and input share the cores.
        """
        saved = 1 - self.in_place_secs / self.step_secs if self.on_gpus else 0.0
        return max(self.share(INPUT_WAIT), saved)

    @property
    def common_share(self) -> float:
        """The share of the traced step outside of towers: averaging and updating, which more towers do not shorten."""
        return self.share(*(part for part in self.seconds if part not in (INPUT_WAIT, NOTHING) and not is_tower(part)))

    def share(self, *parts: str) -> float:
        """Returns the share of these parts in the traced step's duration."""
        return sum(self.seconds.get(part, 0.0) for part in parts) / sum(self.seconds.values())


def is_tower(part: str) -> bool:
    return bool(_TOWER.match(part))


def seconds_by_part(operations: Sequence[Operation]) -> dict[str, float]:
    """Divides the duration of a step among its parts.

    Parts whose operations run at the same moment share it equally; waiting for input counts only while nothing else
    runs. So the parts add up to the time from the first operation's start to the last's end.
    """
    changes = sorted([(o.start, 1, o.part) for o in operations] + [(o.end, -1, o.part) for o in operations])
    seconds: dict[str, float] = {}
    running: collections.Counter[str] = collections.Counter()
    for (moment, change, changed), (until, _, _) in itertools.pairwise(changes):
        running[changed] += change
        if until > moment:
            active = set(+running)
            working = active - {INPUT_WAIT} or active or {NOTHING}
            for part in working:
                seconds[part] = seconds.get(part, 0.0) + (until - moment) / len(working)
    return seconds


def table(breakdowns: Sequence[Breakdown]) -> list[str]:
    """Tabulates milliseconds and share of a step by name scope, a column per tower count."""
    parts = sorted({part for one in breakdowns for part in one.seconds if one.share(part) >= _SHOWN})
    parts.sort(key=lambda part: (part in (INPUT_WAIT, NOTHING), not is_tower(part)))

    def column(one: Breakdown) -> list[str]:
        others = sum(secs for part, secs in one.seconds.items() if part not in parts)
        whole, timed = sum(one.seconds.values()), [*(one.seconds.get(part, 0.0) for part in parts), others]
        return [
            sides.counted(one.towers, "tower"),
            *(f"{secs * 1e3:.1f} ms {secs / whole:4.0%}" if secs else "" for secs in timed),
            f"{one.step_secs * 1e3:.1f} ms",
            f"{one.in_place_secs * 1e3:.1f} ms {min(1.0, one.in_place_secs / one.step_secs):4.0%}",
            f"{one.busy:.0%} of {one.cores}",
            f"{one.busy_here:.0%} of {one.cores}",
        ]

    timed = ["others", "a step, without tracing", "a step with its input in place"]
    rows = ["name scope", *parts, *timed, "cores busy meanwhile", "cores busy with this"]
    head, *body = zip(rows, *map(column, breakdowns), strict=True)
    return comparison.markdown(head, body)


def sentence(fewest: Breakdown, most: Breakdown) -> str:
    """Says whether more towers help, and if not, why, from the fewest and the most at the same global batch."""
    gain, perfect = fewest.step_secs / most.step_secs, most.towers / fewest.towers
    if perfect > 1 and gain >= _BUSY * perfect:
        return f"More towers help: {most.towers} are {gain:.2f} times as fast as {fewest.towers}."
    share, reason = max(
        (most.input_share, "the towers wait for input (input-bound); make the preprocessing cheaper"),
        (most.common_share, "gradients are averaged and variables updated, which more towers do not shorten"),
    )
    if not most.on_gpus and most.busy >= _BUSY:
        others = most.busy - most.busy_here
        note = f", {others:.0%} by other processes" if others >= _NOTICEABLE else ""
        return f"More towers do not help: the {most.cores} cores are {most.busy:.0%} busy{note} (cores exhausted)."
    if share < _NOTICEABLE:
        return (
            "Nothing in the step stands in the way of more towers: waiting for input and averaging each take "
            f"less than {_NOTICEABLE:.0%} of it."
        )
    return f"More towers do not help: for {share:.0%} of the step {reason}."
