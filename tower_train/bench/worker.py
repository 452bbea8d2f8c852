"""A side's process: python -m tower_train.bench.worker SPEC, which exchanges lines of JSON with the benchmark.

It imports TensorFlow, builds the side of SPEC (JSON), warms up, and reports the first step and when it is ready. From
then on it does steps only on request: each line on standard input is one measurement. In between it stands still within
its training loop, with full input queues, and so takes no time from the side that is measured.

    worker:     {"event": "first_step", "import_secs": 2.2}
    worker:     {"event": "warming_up"}, after each thousand steps of a long warm-up
    worker:     {"event": "ready", "work_per_step": 128, "peak_bytes": 800000000, "card_bytes": []}
    benchmark:  {"seconds": 5}, with "each" if it wants to know of each step
    worker:     {"event": "measured", "steps": 134, "seconds": 5.01, ...}, "first" being its first step's number and
                "step_secs" the seconds of each
    benchmark:  {}, or the end of its output
    worker:     {"event": "stopped", "peak_bytes": 900000000, "card_bytes": []}

The worker of a side with several processes starts the others, its peers, which exchange no lines and find their task in
TF_CONFIG. When one of these processes ends in any way, all do.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence

from tower_train import errors, host
from tower_train.options import command_line

WARM_UP_STEPS, WARM_UP_SECS = 10, 1.0
SIGN_OF_LIFE_STEPS = 1000  # so that a long warm-up does not look like a hang
LEAD_IN_STEPS = 5  # about the side's prepared input, which they use up before the measurement


class Pacer:
    """Lets a side do steps while they are wanted, and holds it in between.

    A side calls `after_step` after every step, and leaves when that returns True.

    Args:
      channel, requests: files of the lines to and from the benchmark.
      import_secs: duration of importing TensorFlow.
      work_per_step: a step's examples or floating-point operations; a side may set it.
      warm_up_steps: steps before it is ready.
      peers: numbers of the side's other processes.
      card_bytes: returns the peak of the side's memory on each GPU that it uses.

    Attributes:
    """

    def __init__(
        self, channel, requests, import_secs: float, work_per_step: int | None, warm_up_steps: int,
        peers: Sequence[int] = (), card_bytes: Callable[[], list[int]] = list,
    ):  # fmt: skip
        self.work_per_step = work_per_step
        self._channel, self._requests, self._peers = channel, requests, peers
        self._import_secs, self._warm_up_steps, self._card_bytes = import_secs, warm_up_steps, card_bytes
        self._done = 1  # steps of the side, when the first has ended
        self._steps = self._pace()
        next(self._steps)

    def after_step(self, loss: float | None = None) -> bool:
        """Returns whether the side is to stop, at once or when the next measurement begins."""
        del loss
        return next(self._steps, True)

    def _pace(self) -> Iterator[bool]:
        """Yields False for each step of the side."""
        yield False
        self._tell("first_step", import_secs=self._import_secs)
        for _ in range(self._warm_up_steps // SIGN_OF_LIFE_STEPS):
            yield from self._do(0, SIGN_OF_LIFE_STEPS)
            self._tell("warming_up")
        yield from self._do(WARM_UP_SECS, self._warm_up_steps % SIGN_OF_LIFE_STEPS)
        self._tell("ready", work_per_step=self.work_per_step, **self._peaks())
        while True:
            idle = -time.perf_counter(), -host.processor_secs(self._peers)
            request = json.loads(self._requests.readline() or "{}")
            idle = idle[0] + time.perf_counter(), idle[1] + host.processor_secs(self._peers)
            if not request:
                break
            yield from self._do(0, LEAD_IN_STEPS)
            start, first = time.perf_counter(), self._done + 1
            ends = yield from self._do(request.get("seconds", 0), request.get("steps", 1))
            seconds = time.perf_counter() - start
            secs = [end - begin for begin, end in itertools.pairwise([start, *ends])]
            each = {"first": first, "step_secs": secs} if request.get("each") else {}
            self._tell("measured", steps=len(ends), seconds=seconds, idle_secs=idle[0], idle_cpu_secs=idle[1],
                       resident_bytes=host.resident_bytes("VmRSS", self._peers), **each)  # fmt: skip
        self._tell("stopped", **self._peaks())

    def _peaks(self) -> dict:
        return {"peak_bytes": host.resident_bytes("VmHWM", self._peers), "card_bytes": self._card_bytes()}

    def _do(self, seconds: float, steps: int) -> Iterator[bool]:
        """Lets the side do at least so many steps, for at least so long; returns when each ended."""
        end, ends = time.perf_counter() + seconds, []
        while len(ends) < steps or time.perf_counter() < end:
            yield False
            ends.append(time.perf_counter())
        self._done += len(ends)
        return ends

    def _tell(self, event: str, **content) -> None:
        self._channel.write(json.dumps({"event": event, **content}) + "\n")
        self._channel.flush()


def start_peers(spec: dict) -> list[int]:
    """Starts the peers of this process, if its side has any; returns their process numbers. All end together."""
    hosts = host.free_addresses(spec.get("num_processes", 1))
    if len(hosts) == 1:
        return []
    own, *others = (
        json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})
        for index in range(len(hosts))
    )
    os.environ["TF_CONFIG"] = own
    command = [sys.executable, "-m", __spec__.name, json.dumps(spec | {"is_peer": True})]
    peers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=os.environ | {"TF_CONFIG": other})
        for other in others
    ]
    for peer in peers:
        threading.Thread(target=_end_with_peer, args=[peer], daemon=True).start()
    return [peer.pid for peer in peers]


def _end_with_peer(peer: subprocess.Popen) -> None:
    os.write(2, f"another process of this side ended with status {peer.wait()}\n".encode())
    os._exit(1)


def _end_with_worker() -> None:
    sys.stdin.read()
    os._exit(0)


def _run_peer(spec: dict) -> None:
    threading.Thread(target=_end_with_worker, daemon=True).start()
    command_line.import_tensorflow()
    from tower_train.bench import sides

    scratch = os.path.join(spec["scratch"], f"of process {os.getpid()}")
    os.makedirs(scratch)
    sides.run(spec | {"scratch": scratch}, types.SimpleNamespace(after_step=lambda loss=None: False))


def _run_worker(spec: dict) -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a side's output must not get among the lines
    start = time.perf_counter()
    command_line.import_tensorflow()
    import_secs = time.perf_counter() - start
    from tower_train.bench import sides

    try:
        if spec["kind"] == "describe":
            channel.write(json.dumps({"event": "described", **sides.describe(spec)}) + "\n")
        else:
            warm_up_steps = spec.get("warm_up_steps", WARM_UP_STEPS)
            peers = start_peers(spec)
            work = spec["batch_size"]
            sides.run(spec, Pacer(channel, sys.stdin, import_secs, work, warm_up_steps, peers, sides.card_bytes))
    except errors.UserError as error:
        channel.write(json.dumps({"event": "refused", "message": str(error)}) + "\n")
    channel.close()


def main(argv: list[str]) -> int:
    spec = json.loads(argv[1])
    if spec.get("is_peer"):
        _run_peer(spec)
    else:
        _run_worker(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
