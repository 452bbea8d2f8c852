"""One process of a cluster, from its start to the end that all come to together; who is missing, and since when.

The training itself needs nobody to lead: its collective operations wait for each other. Beside it every process says on
the chief's board, every second and more often while nothing is trained, that it is alive and where it is. The chief
decides who is missing; the others read that from the board, or miss the chief.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.board import Board
from tower_train.cluster.task import Place
from tower_train.graph.devices import Devices
from tower_train.run import report

v1 = tf.compat.v1

STARTING, READY, TRAINING, DONE, GONE, FAILED = "starting", "ready", "training", "done", "gone", "failed"
_GRACE_SECS = 5  # for the step under way to end once its session is closed
_WAITING_SECS = 0.1  # between looks at the board while nothing is trained
ANOTHER = "another worker"
_NEXT = (
    "The same command on every machine, or the return of the missing one with --wait_for_workers, goes on from the "
    "last checkpoint."
)
_WAITED = (
    "--wait_for_workers: python -m tower_train starts itself again; a program that calls train() must be started "
    "again. Both then go on from the last checkpoint."
)
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError,
         tf.errors.InternalError, tf.errors.FailedPreconditionError, RuntimeError)  # fmt: skip


class Member(v1.train.SessionRunHook):
    """Use as a context manager around a start of a run, and as a hook.

    Attributes:
      place: this process's.
      placed: its devices as one of several.
      target: the server to open sessions on.
      step: the last one done.
    """

    def __init__(self, place: Place, placed: Devices, timeout_secs: float, wait: bool):
        """Args: this process's place; its devices, as for a process by itself; after how long without a sign of life a
        worker is missing; whether to wait for those that have not started for longer than that.

        Raises:
          RunError: the server cannot be started.
        """
        self.place, self._timeout, self._wait = place, timeout_secs, wait
        self._next = f"The step under way is not saved. {_WAITED if wait else _NEXT}"
        self._interval = min(1.0, timeout_secs / 10)
        self._lock = threading.Lock()
        self._row = {"id": uuid.uuid4().hex, "beat": 0, "state": STARTING, "step": 0}
        self._rows: list[dict] = [{} for _ in place.hosts]  # as last read; the followers know the chief's and their own
        self._heard = [time.monotonic()] * len(place.hosts)
        self._told = self._heard[0]
        self.step, self._trouble, self._session = 0, None, None
        self._news, self._ended, self._freed = threading.Event(), threading.Event(), threading.Event()
        self.placed = _among_workers(placed, place)
        config = self.placed.session_config
        try:
            self._server = tf.distribute.Server({"worker": list(place.hosts)}, "worker", place.index, config=config)
        except tf.errors.OpError as error:
            raise errors.RunError(
                f"{place.name(place.index)} cannot be started: its port is in use, or cannot be had ({error.message}). "
                "Stop what uses it, or give --worker_hosts with another port."
            ) from None
        self.target = self._server.target
        chief = self.target if place.is_chief else f"grpc://{place.hosts[0]}"
        self._board = Board(chief, len(place.hosts), place.index, max(1.0, 2 * self._interval))
        self._thread = threading.Thread(target=self._watch, name="cluster", daemon=True)

    def __enter__(self):
        if self.place.is_chief:
            self._board.clear()
        self._thread.start()
        return self

    def __exit__(self, kind, error, _):
        if error is not None and not self._trouble:
            text = str(error) if isinstance(error, errors.UserError) else f"{kind.__name__}"
            self._say(state=FAILED, text=text, status=getattr(error, "exit_status", 1))
        if error is not None:
            time.sleep(3 * self._interval)  # for the others to read why
        self._freed.set()
        self._end_watch()

    def _end_watch(self) -> None:
        self._ended.set()
        self._news.set()
        self._thread.join(_GRACE_SECS)

    def after_run(self, run_context, run_values):
        self.step += 1
        self._row["step"] = self.step

    def session_opened(self, session: v1.Session) -> None:
        """To be told of the session as soon as it is there, so that a step which waits for a missing worker ends."""
        self._session = session

    def meet(self, about: dict, first_step: int = 0, last_step: int = 0) -> tuple[int, int]:
        """Waits until all are ready to train the same, from the same step to the same step.

        Args:
          about: what must be the same in all workers, by name.
          first_step, last_step: the chief's.

        Returns:
          The chief's first_step and last_step.

        Raises:
          ConfigError: this worker, or another, is not about the same as the chief.
          WorkerError: a worker is missing.
        """
        self.step = self._row["step"] = first_step
        if self.place.is_chief:
            self._say(about=about, steps=[first_step, last_step])
            while not all(row.get("state") == READY for row in self._rows[1:]):
                self._pause()
            self._say(state=TRAINING)
            return first_step, last_step
        while "about" not in self._rows[0]:
            self._pause()
        there, here = self._rows[0]["about"], json.loads(json.dumps(about))
        differing = [f"{name} is {here.get(name)}, the chief's {there.get(name)}"
                     for name in sorted({*there, *here}) if there.get(name) != here.get(name)]  # fmt: skip
        if differing:
            raise errors.ConfigError(
                f"{self.place.name(self.place.index)} cannot train along: {'; '.join(differing)}. Start all workers "
                "with the same code, options and data."
            )
        self._say(state=READY)
        while self._rows[0].get("state") != TRAINING:
            self._pause()
        self._say(state=TRAINING)
        first_step, last_step = self._rows[0]["steps"]
        self.step = self._row["step"] = first_step
        return first_step, last_step

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        """Turns what TensorFlow raises where a worker is missing into who that is.

        Raises:
          WorkerError: a worker is missing.
        """
        try:
            yield
        except _LOST as error:
            deadline = time.monotonic() + self._timeout + 5 * self._interval
            while not self._trouble and time.monotonic() < deadline:
                time.sleep(self._interval / 5)
            self._freed.set()
            if self._trouble:
                raise self._trouble from error
            raise

    def leave(self, stopped_by: str) -> str:
        """Waits until all have come to their end, so that nobody misses what another still has to send.

        Args:
          stopped_by: what ended this worker's steps; ANOTHER where another worker knows.

        Returns:
          What ended the run, the same in all workers.

        Raises:
          WorkerError: the chief is missing, which had yet to save.
        """
        self._say(state=DONE, stopped_by=stopped_by)
        if self.place.is_chief:
            self._wait_for_others(DONE, GONE)
            reasons = [stopped_by, *(row.get("stopped_by") for row in self._rows[1:])]
            stopped_by = next((reason for reason in reasons if reason not in (None, ANOTHER)), stopped_by)
            self._say(over=stopped_by)
            self._wait_for_others(GONE)
            return stopped_by
        while "over" not in self._rows[0]:
            self._pause()
        self._end_watch()
        self._say(state=GONE)
        self._beat()
        return self._rows[0]["over"]

    def _wait_for_others(self, *states: str) -> None:
        """For the chief: until all others are in one of these states, have failed, or are missing."""
        while waited := [i for i, row in enumerate(self._rows) if i and row.get("state") not in (*states, FAILED)]:
            if all(time.monotonic() - self._heard[i] > self._timeout for i in waited):
                break
            time.sleep(_WAITING_SECS)

    def _say(self, **what) -> None:
        with self._lock:
            self._row |= what
        self._news.set()

    def _pause(self) -> None:
        time.sleep(_WAITING_SECS)
        if self._trouble:
            self._freed.set()
            raise self._trouble

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._news.wait(self._interval if self._row["state"] == TRAINING else _WAITING_SECS)
            self._news.clear()
            try:
                self._beat()
                found = None if self._trouble else self._what_is_wrong()
            except Exception as error:  # nobody may be left waiting for a thread that has died
                found = errors.WorkerError(f"The watch over the workers has failed: {error!r}. {self._next}")
            if found and not self._trouble:
                self._trouble = found
                self._release()

    def _beat(self) -> None:
        with self._lock:
            self._row["beat"] += 1
            row = dict(self._row)
        try:
            rows = self._board.exchange(row)
        except tf.errors.OpError:
            return
        now = time.monotonic()
        for i, found in enumerate(rows):
            if found.get("beat") != self._rows[i].get("beat"):
                self._heard[i] = now
            before = self._rows[i]
            again = before.get("id", found.get("id")) != found.get("id") and self._row["state"] in (READY, TRAINING)
            self._rows[i] = found | {"restarted": again or before.get("restarted", False)}

    def _what_is_wrong(self) -> errors.UserError | None:
        """What ends this start; None where all is well. The chief tells the others."""
        if not self.place.is_chief and self._rows[0].get("state") == FAILED:
            return _failure(self._rows[0]["text"], self._rows[0]["status"])
        if self._row["state"] == DONE and self.place.is_chief:
            return None
        for i in range(len(self._rows) if self.place.is_chief else 1):
            if i == self.place.index or self._rows[i].get("over"):
                continue
            problem = self._problem(i)
            if problem:
                text, status = problem
                self._say(state=FAILED, text=text, status=status)
                return _failure(text, status)
        return None

    def _problem(self, i: int) -> tuple[str, int] | None:
        """What is wrong with a worker, as (text, status)."""
        row, silent, name = self._rows[i], time.monotonic() - self._heard[i], self.place.name(i)
        if row.get("state") == FAILED:
            return (row["text"] if name in row["text"] else f"{name}: {row['text']}"), row["status"]
        if row.get("restarted"):
            return f"{name} was started again at step {self.step}. {self._next}", errors.WorkerError.exit_status
        if silent <= self._timeout:
            return None
        if "step" in row:
            text = f"{name} is missing: no sign of life for {silent:.0f} s, last seen at step {row['step']}."
            return f"{text} {self._next}", errors.WorkerError.exit_status
        if not self._wait:
            return f"{name} has not started for {silent:.0f} s. {self._next}", errors.WorkerError.exit_status
        if time.monotonic() - self._told > self._timeout:
            self._told = time.monotonic()
            report.print_lines([f"*** Waiting for {name}."])
        return None

    def _release(self) -> None:
        """Frees a step that waits for a missing worker; leaves without it where that does not help."""
        for _ in range(3):  # the others read from the chief who is missing, and would else miss the chief
            self._beat()
            time.sleep(self._interval / 2)
        if self._session:
            threading.Thread(target=self._session.close, daemon=True).start()
        if not self._freed.wait(_GRACE_SECS):
            print(f"tower_train: error: {self._trouble}", file=sys.stderr, flush=True)
            os._exit(self._trouble.exit_status)


def _among_workers(placed: Devices, place: Place) -> Devices:
    config = v1.ConfigProto()
    config.CopyFrom(placed.session_config)
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    # A session sees this worker's devices only, so that it need not wait for the others.
    config.device_filters.append(f"/job:worker/task:{place.index}")
    return dataclasses.replace(placed, session_config=config, num_workers=len(place.hosts), worker=place.index)


def _failure(text: str, status: int) -> errors.UserError:
    error = errors.WorkerError(text)
    error.exit_status = status
    return error
