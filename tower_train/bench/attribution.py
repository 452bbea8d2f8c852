"""Where a step's time goes, from a trace of its operations, and why more towers do not help. No TensorFlow here."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

INPUT_WAIT = "input wait"
AVERAGING = "averaging"
DECAY_AND_CHECK = "weight decay, finiteness check"
UPDATE = "update"
MOVING_AVERAGES = "moving averages"
OTHER = "other operations"
NOTHING = "no operation running"

# The first pattern that an operation's name begins with says what it belongs to: the name scopes that graph/ gives;
# the update is in the branches of the conditional `train`.
_PATTERNS = [
    (INPUT_WAIT, re.compile(r"Iterator")),
    (AVERAGING, re.compile(r"average_|all_reduce/")),
    (DECAY_AND_CHECK, re.compile(r"weight_decay/|.*/Regularizer/|check_finite/")),
    (MOVING_AVERAGES, re.compile(r"train/.*ExponentialMovingAverage")),
    (UPDATE, re.compile(r"train/")),
]
_TOWER = re.compile(r"tower_(\d+)/")
_BY_OPTIMIZERS = re.compile(r"^(ConstantFolding/|GroupCrossDeviceControlEdges_\d+/|Func/)+")
_BUSY = 0.85  # of the cores: threads that wait for each other now and then are never all of them at work
_NOTICEABLE = 0.05  # of a step


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of one step: its name and device, when it ran in seconds since some moment."""

    name: str
    device: str
    start: float
    end: float

    @property
    def category(self) -> str:
        """What it belongs to: 'tower 0', ..., or one of the constants above."""
        name = _BY_OPTIMIZERS.sub("", self.name)
        if tower := _TOWER.match(name):
            return f"tower {tower[1]}"
        return next((category for category, pattern in _PATTERNS if pattern.match(name)), OTHER)


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Where the time of a step goes.

    Attributes:
      towers: their number.
      on_gpus: whether each has a device of its own; logical CPU devices share the cores.
      step_secs: a step's time, without tracing.
      cores: how many there are.
      busy, own: how much of them was in use meanwhile, and in use by this process, 0 to 1.
      seconds: by category, of a traced step; together they are its duration.
      late_tower, late_secs: the last tower to finish, and how long after the one before it; 0.0 with one tower.
    """

    towers: int
    on_gpus: bool
    step_secs: float
    cores: int
    busy: float
    own: float
    seconds: dict[str, float]
    late_tower: int
    late_secs: float

    def share(self, *categories: str) -> float:
        """Of the traced step's duration."""
        return sum(self.seconds.get(category, 0.0) for category in categories) / sum(self.seconds.values())


def seconds_by_category(operations: Sequence[Operation]) -> dict[str, float]:
    """Shares the duration of a step out among the categories.

    A moment at which several categories have an operation running is shared equally by them; waiting for input counts
    only where nothing else runs. So the parts add up to the time from the first operation's start to the last's end.
    """
    seconds: dict[str, float] = {}
    for duration, active in _spans(operations):
        working = active - {INPUT_WAIT} or active or {NOTHING}
        for category in working:
            seconds[category] = seconds.get(category, 0.0) + duration / len(working)
    return seconds


def lateness(operations: Sequence[Operation]) -> tuple[int, float]:
    """The tower that finishes last, and how many seconds after the one before it; 0.0 with one tower."""
    ends: dict[int, float] = {}
    for operation in operations:
        if operation.category.startswith("tower "):
            tower = int(operation.category.removeprefix("tower "))
            ends[tower] = max(ends.get(tower, operation.end), operation.end)
    in_order = sorted(ends, key=ends.__getitem__)
    if len(in_order) < 2:
        return (in_order or [0])[0], 0.0
    return in_order[-1], ends[in_order[-1]] - ends[in_order[-2]]


def sentence(fewest: Breakdown, most: Breakdown) -> str:
    """Whether more towers help, and if not, why.

    Args:
      fewest, most: the breakdowns of the smallest and of the greatest number of towers, at one global batch.
    """
    gain, perfect = fewest.step_secs / most.step_secs, most.towers / fewest.towers
    if perfect > 1 and gain >= _BUSY * perfect:
        return f"More towers help: {most.towers} are {gain:.2f} times as fast as {fewest.towers}."
    if not most.on_gpus and most.busy >= _BUSY:
        others = most.busy - most.own
        note = f", {others:.0%} by other processes" if others >= _NOTICEABLE else ""
        share, reason = most.busy, f"the {most.cores} cores are {{:.0%}} busy{note} (cores exhausted)"
    else:
        share, reason = max(_waits(most))
    if share < _NOTICEABLE:
        return (
            "Nothing in the step stands in the way of more towers: waiting for input, for the last tower and for "
            f"averaging each take less than {_NOTICEABLE:.0%} of it."
        )
    return f"More towers do not help: {reason.format(share)}."


def _waits(breakdown: Breakdown) -> list[tuple[float, str]]:
    """What the towers wait for: its share of the step, and the reason in words with a place for the share."""
    return [
        (
            breakdown.share(INPUT_WAIT),
            "the towers wait for input for {:.0%} of the step (input-bound); make the preprocessing cheaper",
        ),
        (
            breakdown.late_secs / sum(breakdown.seconds.values()),
            f"tower {breakdown.late_tower} finishes {breakdown.late_secs * 1e3:.1f} ms after the others, which wait "
            "for it for {:.0%} of the step (one tower late)",
        ),
        (
            breakdown.share(AVERAGING, DECAY_AND_CHECK, UPDATE, MOVING_AVERAGES),
            "averaging the gradients and updating the variables takes {:.0%} of the step, and more towers do not "
            "shorten that (averaging)",
        ),
    ]


def chrome_trace(operations: Sequence[Operation]) -> dict:
    """The operations in the Trace Event Format of chrome://tracing and ui.perfetto.dev; no two overlap in a lane."""
    devices = sorted({operation.device for operation in operations})
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device}} for pid, device in enumerate(devices)
    ]
    free_from: dict[str, list[float]] = {device: [] for device in devices}
    origin = min((operation.start for operation in operations), default=0.0)
    for operation in sorted(operations, key=lambda o: o.start):
        lanes = free_from[operation.device]
        lane = next((i for i, end in enumerate(lanes) if end <= operation.start), len(lanes))
        lanes[lane : lane + 1] = [operation.end]
        events.append(
            {
                "ph": "X", "name": operation.name, "cat": operation.category, "pid": devices.index(operation.device),
                "tid": lane, "ts": (operation.start - origin) * 1e6, "dur": (operation.end - operation.start) * 1e6,
                "args": {"category": operation.category},
            }
        )  # fmt: skip
    return {"traceEvents": events}


def _spans(operations: Sequence[Operation]) -> Iterator[tuple[float, set[str]]]:
    """Yields (seconds, categories with an operation running) of the step, moment after moment."""
    changes = sorted([(o.start, 1, o.category) for o in operations] + [(o.end, -1, o.category) for o in operations])
    running: dict[str, int] = {}
    before = None
    for moment, change, category in changes:
        if before is not None and moment > before:
            yield moment - before, {name for name, count in running.items() if count}
        running[category] = running.get(category, 0) + change
        before = moment
