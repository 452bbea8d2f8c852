"""Results of the benchmark, and their arithmetic from rounds to medians and ratios.

The machine's speed changes during a benchmark, so ratios are taken within a round.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from tower_train.bench.sides import Side


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of several rounds: its median, and the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Figure":
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass
class Result:
    """The measurements of one side, and a row of the table."""

    side: Side
    # examples/sec by round; a ceiling's are those for which its products suffice
    rates: dict[int, float] = dataclasses.field(default_factory=dict)
    first_step_secs: float = 0.0  # from the start of its process to the end of its first step
    examples_per_step: float = 0.0  # as its process says it
    peak_bytes: int = 0  # resident memory at its peak
    card_bytes: int = 0  # likewise of the GPU with most of it; 0 without
    idle_secs: float = 0.0  # the time in which it stood still
    idle_cpu_secs: float = 0.0  # its processor time then
    rate: Figure | None = None  # examples/sec over the rounds
    ratio: Figure | None = None  # to the first side
    share: Figure | None = None  # of the ceiling of the same arithmetic; None if that was not measured
    ceiling: float | None = None  # that ceiling in examples/sec

    def add_start(self, answer: dict) -> None:
        """Adds what its worker says when it is ready."""
        self.first_step_secs = answer["first_step_secs"]
        self.examples_per_step = answer["examples_per_step"]
        self.add_peaks(answer)

    def add_round(self, number: int, answer: dict) -> None:
        """Adds a measurement."""
        self.rates[number] = answer["steps"] * self.examples_per_step / answer["seconds"]
        self.idle_secs += answer["idle_secs"]
        self.idle_cpu_secs += answer["idle_cpu_secs"]

    def add_peaks(self, answer: dict) -> None:
        """Adds what its worker says at the end."""
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.card_bytes = max(self.card_bytes, answer["card_bytes"])

    def over(self, base: "Result", times: int = 1) -> Figure:
        """Returns the ratio of its rates to so many times those of the base, over the rounds."""
        return Figure.of(rate / (times * base.rates[number]) for number, rate in self.rates.items())


def compare(results: Sequence[Result], on_gpus: bool = False) -> Sequence[Result]:
    """Fills in the rates of measured sides, their ratios to the first, and their shares of the ceilings, which are one
    device's: several GPUs are compared with as many. on_gpus: each tower has one; logical CPU devices share cores."""
    ceilings = {result.side.dtype: result for result in results if result.side.is_ceiling}
    for result in results:
        result.rate, result.ratio = Figure.of(result.rates.values()), result.over(results[0])
        if ceiling := ceilings.get(result.side.dtype):
            times = result.side.num_devices if on_gpus else 1
            result.share = result.over(ceiling, times)
            result.ceiling = times * statistics.median(ceiling.rates.values())
    return results
