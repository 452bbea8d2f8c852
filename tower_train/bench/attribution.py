"""Parts of a step's time, from a trace of its operations."""

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
_SHOWN = 0.005  # of a step, from which a name scope has a line


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
    step_secs: float  # a step's time, without tracing
    seconds: dict[str, float]  # by part, of a traced step; together they are its duration

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
        ]

    rows = ["name scope", *parts, "others", "a step, without tracing"]
    head, *body = zip(rows, *map(column, breakdowns), strict=True)
    return comparison.markdown(head, body)
