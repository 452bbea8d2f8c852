"""The processes of the sides: start-up, requests, and the error when one dies or hangs."""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import time

from tower_train import errors

_TAIL_LINES, _TAIL_CHARACTERS = 3, 600


class SideError(errors.UserError):
    """A side's process that died, hangs, or refused to run."""

    exit_status = 1


class Worker:
    """A process of `tower_train.bench.worker`. Use as a context manager, which ends the process.

    Args:
      name: of its side, for messages.
      spec: argument of `sides.run` or `sides.describe`.
      scratch: a directory of its own, made here; its standard error goes there.
      timeout_secs: time limit of an answer.
    """

    def __init__(self, name: str, spec: dict, scratch: pathlib.Path, timeout_secs: float):
        self.name, self._timeout_secs = name, timeout_secs
        scratch.mkdir()
        self._stderr_path = scratch / "stderr"
        self._started = time.perf_counter()
        with open(self._stderr_path, "w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=_environment(spec),
                bufsize=0,  # `select` does not see lines that are read ahead
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its workers
            )  # fmt: skip
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def wait_for(self, event: str, extra_secs: float = 0.0) -> dict:
        """Returns its next line, of `event`, with the seconds from its start as "secs"; SideError for another line or
        none."""
        while True:
            answer = json.loads(self._next_line(event, self._timeout_secs + extra_secs))
            if answer["event"] == "refused":
                raise SideError(f"{self.name}: {answer['message']}")
            if answer["event"] == event:
                return answer | {"secs": time.perf_counter() - self._started}
            if answer["event"] != "warming_up":
                raise SideError(f"{self.name}: its process said {json.dumps(answer)} instead of {event!r}.")

    def measure(self, seconds: float = 0.0, steps: int = 1, each: bool = False) -> dict:
        """Lets it do at least so many steps for at least so long; returns its measurement (each: of each step too)."""
        self._send({"seconds": seconds, "steps": steps, "each": each})
        return self.wait_for("measured", seconds)

    def stop(self) -> dict:
        """Ends its steps; returns its last answer. Does not wait for what it does then, such as saving."""
        self._send({})
        return self.wait_for("stopped")

    def _send(self, request: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # wait_for then gives the reason
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _next_line(self, event: str, secs: float) -> bytes:
        if not select.select([self._process.stdout], [], [], secs)[0]:
            raise SideError(
                f"{self.name}: its process hangs: no {event!r} within {secs:g} seconds. More can be had with "
                f"--timeout_secs. {self._last_words()}"
            )
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.name}: its process ended with status {self._process.wait()}. {self._last_words()}")
        return line

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._stderr_path.read_text(errors="replace").splitlines() if line.strip()]
        if not lines:
            return "It left no word."
        return f"Its last words: {' | '.join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]}"


def _environment(spec: dict) -> dict[str, str]:
    """Leaves room for other processes in the GPUs' memory, and hides GPUs from sides that train on CPUs."""
    chosen = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} | ({"CUDA_VISIBLE_DEVICES": "-1"} if spec["device"] == "cpu" else {})
    return os.environ | chosen
