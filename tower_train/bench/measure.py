"""Measuring: the processes of all sides live at once, and one of them does steps while the others stand still.

The machine's speed changes during a benchmark, so ratios are taken within a round.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from tower_train import console, errors
from tower_train.bench.sides import BenchmarkOptions, Side

_TAIL_LINES, _TAIL_CHARACTERS = 3, 600


class SideError(errors.UserError):
    """A side's process that died or hangs."""

    exit_status = 1


class Worker:
    """The process of a side (`tower_train.bench.worker`). Use as a context manager, which ends the process."""

    def __init__(self, side: Side, options: BenchmarkOptions, scratch: pathlib.Path):
        scratch.mkdir()  # for its files and its standard error
        self.title, self._timeout_secs, self._stderr_path = side.title, options.timeout_secs, scratch / "stderr"
        self._batch_size = side.batch_size or options.batch_size
        spec = {
            "train": side.train,
            "arguments": side.arguments,
            "batch_size": self._batch_size,
            "dataset": options.dataset,
            "data_dir": options.data_dir,
            "started": time.time(),
            "without_tensorflow": side.without_tensorflow,
        }
        environment = os.environ | {"TMPDIR": str(scratch), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # room for others
        # Huge pages for all sides, as scripts/train has them; where there are none the C library ignores it.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        with open(self._stderr_path, "w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                bufsize=0,  # `select` does not see lines that are read ahead
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its workers
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def answer(self, extra_secs: float = 0.0) -> dict:
        """Returns its next line; SideError if it dies, or says nothing within the time limit and so many seconds."""
        seconds = self._timeout_secs + extra_secs
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise SideError(
                f"{self.title}: its process hangs: no answer within {seconds:g} seconds. More can be had with "
                f"--timeout_secs. {self._last_words()}"
            )
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.title}: its process ended with status {self._process.wait()}. {self._last_words()}")
        return json.loads(line)

    def measure(self, seconds: float) -> float:
        """Lets it do steps for at least so long; returns examples/sec."""
        with contextlib.suppress(BrokenPipeError):  # answer() then gives the reason
            self._process.stdin.write(f"{seconds}\n".encode())
        answer = self.answer(seconds)
        return answer["steps"] * self._batch_size / answer["seconds"]

    def stop(self) -> dict:
        """Ends its steps; returns its last answer. Does not wait for what it does then."""
        self._process.stdin.close()
        return self.answer()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._stderr_path.read_text(errors="replace").splitlines() if line.strip()]
        if not lines:
            return "It ended without a message."
        return f"Its last words: {' | '.join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]}"


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
    rates: dict[int, float] = dataclasses.field(default_factory=dict)  # examples/sec by round
    first_step_secs: float = 0.0  # from the start of its process to the end of its first step
    peak_bytes: int = 0  # resident memory at its peak
    card_bytes: int = 0  # likewise of the GPU with most of it; 0 without
    rate: Figure | None = None  # examples/sec over the rounds
    ratio: Figure | None = None  # to the first side


def in_rounds(
    sides: Sequence[Side], start: Callable[[Side], Worker], rounds: int, seconds: float, together: bool = False
) -> list[Result]:
    """Measures every side `rounds` times, each for `seconds` at least, in an order that changes from round to round.

    `start` starts a side's process; all are alive at once, so that ratios within a round are of the same minutes. With
    `together` they also start at once, which on a machine with many cores saves minutes.
    """
    live: list[tuple[Result, Worker]] = []
    with contextlib.ExitStack() as stack:
        workers = (stack.enter_context(start(side)) for side in sides)
        for side, worker in zip(sides, list(workers) if together else workers, strict=True):
            live.append((Result(side, {}, worker.answer()["first_step_secs"]), worker))
            console.notice(f"{side.title} is ready")
        for number in range(rounds):
            for result, worker in random.Random(number).sample(live, len(live)):
                result.rates[number] = worker.measure(seconds)
            console.notice(f"round {number + 1} of {rounds} is done")
        for result, worker in live:
            peaks = worker.stop()
            result.peak_bytes, result.card_bytes = peaks["peak_bytes"], peaks["card_bytes"]
    return [result for result, _ in live]


def compare(results: Sequence[Result]) -> Sequence[Result]:
    """Fills in the rates of measured sides, and their ratios to the first side within each round."""
    base = results[0].rates
    for result in results:
        result.rate = Figure.of(result.rates.values())
        result.ratio = Figure.of(rate / base[number] for number, rate in result.rates.items())
    return results
