"""The board of a cluster: texts of its workers on the chief's TensorFlow server, so that they share no files."""

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.task import Task
from tower_train.console import say

v1 = tf.compat.v1
_SERVER = "/job:worker/task:0"
_POLL_SECS = 0.01
_STATE_TIMEOUT_SECS = 3600  # the heartbeats end the process sooner if the chief is missing


class WorkerState(str, enum.Enum):
    """Progress of a worker. OVER is the chief's last state, GONE that of the others."""

    STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
    OVER, GONE, FAILED = "over", "gone", "failed"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """A worker's row on the board.

    Attributes:
      start_id: identifies one start of the worker; empty until it has written its row.
      chief: the start_id of the chief that it trains with, or means to.
      members: over workers, the start_ids that the chief trains with, "" for one that does not take part; empty until
        all have agreed.
      next_group: the tasks that the chief expects at its next start; None until that is known.
      heartbeat: their count.
      state: its progress.
      step: the last step done.
      stalled: what its step waits for, if that has not ended for --stall_timeout_secs; else empty.
      stalled_secs: seconds since then.
      waiting_secs: seconds that it has waited for means over workers, if a program reports that.
      about: what all workers must have in common, by name; the chief's, None until it is known.
      steps: the chief's first and last step; None until they are known.
      stopped_by: what ended its steps; the chief's in state OVER: what ended the run.
      failure: in state FAILED, the error's text.
      exit_status: and its exit status.
      is_final: and whether it will not start itself again.
    """

    start_id: str = ""
    chief: str = ""
    members: tuple[str, ...] = ()
    next_group: tuple[int, ...] | None = None
    heartbeat: int = 0
    state: WorkerState = WorkerState.STARTING
    step: int = 0
    stalled: str = ""
    stalled_secs: float = 0.0
    waiting_secs: float = 0.0
    about: dict | None = None
    steps: tuple[int, int] | None = None
    stopped_by: str | None = None
    failure: str = ""
    exit_status: int = errors.WorkerError.exit_status
    is_final: bool = False

    @property
    def group(self) -> tuple[int, ...]:
        """The tasks that train together."""
        return tuple(task for task, start_id in enumerate(self.members) if start_id)

    @property
    def has_mistake(self) -> bool:
        """Whether it has failed, and not because another worker was missing; so it does not start itself again."""
        return self.state is WorkerState.FAILED and self.exit_status != errors.WorkerError.exit_status

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerStatus":
        """Reads a row; fields of other versions of this program are left out. Raises ValueError or TypeError for any
        other text."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in dict(json.loads(text)).items() if name in names}
        return cls(**known | {"state": WorkerState(known.get("state", cls.state))})


class Board:
    """One worker's access to the board: a row for each worker's status, and a place for its part of a checkpoint.

    The chief hands out the parts of the restored checkpoint, and collects those of the next one, as bytes.

    Args:
      target: the chief's server.
      task: this process's.
      timeout_secs: longest duration of an exchange.
      start_of: worker -> id of its start; workers but the chief know their own.
      pause: waits for so many seconds; raises WorkerError once a worker is missing.
    """

    def __init__(
        self, target: str, task: Task, timeout_secs: float, start_of: Callable[[int], str],
        pause: Callable[[float], None],
    ):  # fmt: skip
        self._target, self._task, self._start_of, self._pause, self._session = target, task, start_of, pause, None
        self._config = v1.ConfigProto(device_filters=[_SERVER], operation_timeout_in_ms=round(timeout_secs * 1000))
        workers = range(len(task.hosts))
        rows_read = workers if task.is_chief else [0]  # the chief reads all, the others the chief's
        self._last_read = {i: WorkerStatus() for i in rows_read}
        with tf.Graph().as_default() as self._graph, tf.device(f"{_SERVER}/cpu:0"):
            self._text = v1.placeholder(tf.string, [])
            self._rows, self._labels, self._states = (
                [_place(f"{kind}/{i}", self._text) for i in workers] for kind in ("row", "label", "state")
            )
            with tf.control_dependencies([self._rows[task.index].write]):
                self._exchange = [_read(self._rows[i].variable) for i in rows_read]

    def clear(self) -> None:
        """Empties all rows; for the chief, before any exchange."""
        self._run([row.write for row in self._rows], {self._text: "{}"})

    def exchange(self, status: WorkerStatus) -> Sequence[WorkerStatus]:
        """Writes this worker's row and returns those it may read: the chief all, the others the chief's; or OpError.

        Instead of a row that cannot be read, because a stranger wrote it, it returns the one before.
        """
        for i, text in zip(self._last_read, self._run(self._exchange, {self._text: status.to_json()}), strict=True):
            try:
                self._last_read[i] = WorkerStatus.from_json(text)
            except (ValueError, TypeError, RecursionError):
                say(f"*** What a stranger wrote as the status of worker {i} is ignored: {ascii(text[:40])}")
        return list(self._last_read.values())

    def hand_out(self, states: Sequence[bytes]) -> None:
        """Leaves, in the chief, the restored states, over workers; call it before any `fetch`."""
        for worker in range(1, len(states)):
            self._put(worker, "", states[worker])

    def fetch(self) -> bytes:
        """Takes, in another worker, its restored state."""
        return self._run_long(self._states[self._task.index].read)

    def send(self, step: int, state: bytes) -> None:
        """Leaves, in another worker, its state after a step, for the chief to `collect`."""
        self._put(self._task.index, self._label(self._task.index, step), state)

    def collect(self, step: int) -> list[bytes]:
        """Waits, in the chief, for all others' states after a step; returns them in order, or raises WorkerError."""
        states = []
        for worker in range(1, len(self._task.hosts)):
            while self._run_long(self._labels[worker].read).decode() != self._label(worker, step):
                self._pause(_POLL_SECS)
            states.append(self._run_long(self._states[worker].read))
        return states

    def _label(self, worker: int, step: int) -> str:
        return f"{self._start_of(worker)} after step {step}"

    def _put(self, worker: int, label: str, state: bytes) -> None:
        # The label comes last: once that is there, the state is.
        for place, text in ((self._states[worker], state), (self._labels[worker], label)):
            self._run_long(place.write, {self._text: text})

    def _run_long(self, fetches, feeds=None):
        return self._run(fetches, feeds, v1.RunOptions(timeout_in_ms=_STATE_TIMEOUT_SECS * 1000))

    def _run(self, fetches, feeds=None, options=None):
        try:
            self._session = session = self._session or v1.Session(self._target, self._graph, self._config)
            return session.run(fetches, feeds, options)
        except tf.errors.OpError:
            self._session = None  # a failed session may not know a restarted server
            raise


class _Place(NamedTuple):
    """A text on the server: the variable, and the operations that write the fed text and read it."""

    variable: tf.Tensor
    write: tf.Operation
    read: tf.Tensor


def _place(name: str, text: tf.Tensor) -> _Place:
    variable = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=name, container="board")
    return _Place(variable, tf.raw_ops.AssignVariableOp(resource=variable, value=text), _read(variable))


def _read(variable: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.string)
