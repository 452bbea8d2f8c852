"""A side's process: python -m tower_train.bench.worker SPEC, which exchanges lines of JSON with the benchmark.

It trains until it is warm, and from then on does steps only on request. In between it stands still within its training
loop, with full input queues, and so takes no time from the side that is measured.

    worker:     {"first_step_secs": 4.1}
    benchmark:  5.0, the seconds to train for
    worker:     {"steps": 134, "seconds": 5.01}
    benchmark:  the end of its output
    worker:     {"peak_bytes": 900000000, "card_bytes": 0}
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator

from tower_train import console, host

WARM_UP_SECS, WARM_UP_STEPS = 1.0, 10
LEAD_IN_STEPS = 5  # about a side's prepared input, which they use up before the measurement


class Pacer:
    """Lets a side do steps while they are wanted, and holds it in between. `Side.train` calls it after every step."""

    def __init__(self, channel, requests, started: float):
        """Exchanges lines by two files. started: time.time() at the start of the process."""
        self._channel, self._requests, self._started = channel, requests, started
        self._steps = self._pace()
        next(self._steps)

    def __call__(self, loss: float | None = None) -> bool:
        """Returns whether the side is to stop."""
        del loss
        return next(self._steps, True)

    def _pace(self) -> Iterator[bool]:
        """Yields False for each step of the side."""
        yield False
        first_step_secs = time.time() - self._started
        yield from self._do(WARM_UP_SECS, WARM_UP_STEPS)
        self._tell(first_step_secs=first_step_secs)
        while request := self._requests.readline():
            yield from self._do(0, LEAD_IN_STEPS)
            start = time.perf_counter()
            steps = yield from self._do(float(request), 1)
            self._tell(steps=steps, seconds=time.perf_counter() - start)
        self._tell(peak_bytes=host.peak_bytes(), card_bytes=_card_bytes())

    def _do(self, seconds: float, steps: int) -> Iterator[bool]:
        """Lets the side do at least so many steps, for at least so long; returns how many."""
        end, done = time.perf_counter() + seconds, 0
        while done < steps or time.perf_counter() < end:
            yield False
            done += 1
        return done

    def _tell(self, **content) -> None:
        self._channel.write(json.dumps(content) + "\n")
        self._channel.flush()


def _card_bytes() -> int:
    """Returns the peak of this process's memory on the GPU that it uses most, as allocators count it; 0 without."""
    if torch := sys.modules.get("torch"):  # it has its own allocator, beside TensorFlow's idle one
        return max((torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())), default=0)
    import tensorflow as tf

    cards = [gpu.name.removeprefix("/device:") for gpu in tf.config.list_logical_devices("GPU")]
    return max((tf.config.experimental.get_memory_info(card)["peak"] for card in cards), default=0)


def main(argv: list[str]) -> int:
    spec = json.loads(argv[1])
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a side's output must not get among the lines
    request = dict(split="train", dataset=spec["dataset"], data_dir=spec["data_dir"])
    if not spec["without_tensorflow"]:
        console.import_tensorflow()
        from tower_train import workload

        workload.take_ours()
        request = workload.DataRequest(**request)
    module, _, function = spec["train"].partition(":")
    pacer = Pacer(channel, sys.stdin, spec["started"])
    train = getattr(importlib.import_module(module), function)
    train(request, spec["batch_size"], pacer, **spec["arguments"])
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
