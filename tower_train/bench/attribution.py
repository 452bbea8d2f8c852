"""Parts of a step's time, from a trace of its operations, and the obstacle to more towers. No TensorFlow here."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

from tower_train.bench import report, systems

INPUT_WAIT = "input wait"
ALL_TOWERS = "all towers"
AVERAGING = "averaging"
DECAY_AND_CHECK = "weight decay, finiteness check"
UPDATE = "update"
MOVING_AVERAGES = "moving averages"
OTHER = "other operations"
NOTHING = "no operation running"

# An operation's category is the first pattern that its name begins with, a name scope of graph/. The update is in the
# branches of the conditional `train`.
_PATTERNS = [
    (INPUT_WAIT, re.compile(r"(input/)?(next_batch/.*)?Iterator")),
    (ALL_TOWERS, re.compile(r"joined/")),
    (AVERAGING, re.compile(r"average_|all_reduce/")),
    (DECAY_AND_CHECK, re.compile(r"weight_decay/|.*/Regularizer/|check_finite/")),
    (MOVING_AVERAGES, re.compile(r"train/.*ExponentialMovingAverage")),
    (UPDATE, re.compile(r"train/")),
]
_TOWER = re.compile(r"tower_(\d+)/")
_BY_OPTIMIZERS = re.compile(r"^(ConstantFolding/|GroupCrossDeviceControlEdges_\d+/|Func/)+")
_BUSY = 0.85  # of the cores: threads that sometimes wait for each other never all work
_NOTICEABLE = 0.05  # of a step


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of one step: name, device, and start and end in seconds since some moment."""

    name: str
    device: str
    start: float
    end: float

    @property
    def category(self) -> str:
        """The part of the step that it belongs to: 'tower 0', ..., or one of the constants above."""
        name = _BY_OPTIMIZERS.sub("", self.name)
        if tower := _TOWER.match(name):
            return f"tower {tower[1]}"
        return next((category for category, pattern in _PATTERNS if pattern.match(name)), OTHER)


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The time of a step by category.

    Attributes:
      on_gpus: whether each tower has its own device; logical CPU devices share the cores.
      step_secs: a step's time, without tracing.
      busy: share of the cores in use meanwhile, 0 to 1.
      own: share of the cores in use by this process, 0 to 1.
      seconds: by category, of a traced step; together they are its duration.
      late_tower: the last tower to finish.
      late_secs: its delay behind the one before it; 0.0 with one tower.
      in_place_secs: a step's time, without tracing, with its input in place; None if not measured.
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
    in_place_secs: float | None = None

    @property
    def input_share(self) -> float:
        """The share of a traced step that only waits for input or, if larger, the share that GPUs save with input in
        place.

        Tracing slows their steps down, which hides slow input. On CPUs towers and input share the cores.
        """
        saved = 1 - self.in_place_secs / self.step_secs if self.on_gpus and self.in_place_secs else 0.0
        return max(self.share(INPUT_WAIT), saved)

    def share(self, *categories: str) -> float:
        """Returns the share of these categories in the traced step's duration."""
        return sum(self.seconds.get(category, 0.0) for category in categories) / sum(self.seconds.values())


def seconds_by_category(operations: Sequence[Operation]) -> dict[str, float]:
    """Divides the duration of a step among the categories.

    Categories whose operations run at the same moment share it equally; waiting for input counts only while nothing
    else runs. So the parts add up to the time from the first operation's start to the last's end.
    """
    changes = sorted([(o.start, 1, o.category) for o in operations] + [(o.end, -1, o.category) for o in operations])
    seconds: dict[str, float] = {}
    running: collections.Counter[str] = collections.Counter()
    for (moment, change, category), (until, _, _) in itertools.pairwise(changes):
        running[category] += change
        if until > moment:
            active = set(+running)
            working = active - {INPUT_WAIT} or active or {NOTHING}
            for part in working:
                seconds[part] = seconds.get(part, 0.0) + (until - moment) / len(working)
    return seconds


def lateness(operations: Sequence[Operation]) -> tuple[int, float]:
    """Returns the tower that finishes last, and its delay in seconds behind the one before it; 0.0 with one tower."""
    named = [(o.end, o.category.partition("tower ")[2]) for o in operations]
    ends = [(end, int(tower)) for end, tower in named if tower]
    last, late_tower = max(ends, default=(0.0, 0))
    return late_tower, last - max((end for end, tower in ends if tower != late_tower), default=last)


def table(breakdowns: Sequence[Breakdown]) -> list[str]:
    """Tabulates milliseconds and share of a step by category, a column per tower count."""

    def part(one: Breakdown, category: str) -> str:
        if category in towers and category not in one.seconds:
            return ""
        return f"{one.seconds.get(category, 0.0) * 1e3:.1f} ms {one.share(category):4.0%}"

    towers = [f"tower {i}" for i in range(max(one.towers for one in breakdowns))] + [ALL_TOWERS]
    towers = [category for category in towers if any(category in one.seconds for one in breakdowns)]
    after = [AVERAGING, DECAY_AND_CHECK, UPDATE, MOVING_AVERAGES, OTHER, NOTHING]
    body = [[category, *(part(one, category) for one in breakdowns)] for category in [INPUT_WAIT, *towers, *after]]
    body.append(["a step, without tracing", *(f"{one.step_secs * 1e3:.1f} ms" for one in breakdowns)])
    if any(one.in_place_secs is not None for one in breakdowns):
        body.append(["a step with its input in place", *map(_in_place, breakdowns)])
    body.append(["cores busy meanwhile", *(f"{one.busy:.0%} of {one.cores}" for one in breakdowns)])
    body.append(["cores busy with this", *(f"{one.own:.0%} of {one.cores}" for one in breakdowns)])
    return report.markdown(["", *(systems.count_of(one.towers, "tower") for one in breakdowns)], body)


def _in_place(one: Breakdown) -> str:
    if one.in_place_secs is None:
        return ""
    return f"{one.in_place_secs * 1e3:.1f} ms {min(1.0, one.in_place_secs / one.step_secs):4.0%}"


def sentence(fewest: Breakdown, most: Breakdown) -> str:
    """Says whether more towers help, and if not, why, from the fewest and the most at the same global batch."""
    gain, perfect = fewest.step_secs / most.step_secs, most.towers / fewest.towers
    if perfect > 1 and gain >= _BUSY * perfect:
        return f"More towers help: {most.towers} are {gain:.2f} times as fast as {fewest.towers}."
    if not most.on_gpus and most.busy >= _BUSY:
        others = most.busy - most.own
        note = f", {others:.0%} by other processes" if others >= _NOTICEABLE else ""
        share, reason = most.busy, f"the {most.cores} cores are {{:.0%}} busy{note} (cores exhausted)"
    else:
        waiting = "the towers wait for input for {:.0%} of the step (input-bound); make the preprocessing cheaper"
        late = (
            f"tower {most.late_tower} finishes {most.late_secs * 1e3:.1f} ms after the others, which wait for it for "
            "{:.0%} of the step (one tower late)"
        )
        averaging = (
            "averaging the gradients and updating the variables takes {:.0%} of the step, and more towers do not "
            "shorten that (averaging)"
        )
        share, reason = max(
            (most.input_share, waiting),
            (most.late_secs / sum(most.seconds.values()), late),
            (most.share(AVERAGING, DECAY_AND_CHECK, UPDATE, MOVING_AVERAGES), averaging),
        )
    if share < _NOTICEABLE:
        return (
            "Nothing in the step stands in the way of more towers: waiting for input, for the last tower and for "
            f"averaging each take less than {_NOTICEABLE:.0%} of it."
        )
    return f"More towers do not help: {reason.format(share)}."
