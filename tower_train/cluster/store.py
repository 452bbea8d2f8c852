"""The cluster's key-value store, on the chief's TensorFlow server: workers exchange texts there, and share no files."""

import dataclasses
import enum
import json
import socket
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.task import Task
from tower_train.console import say

v1 = tf.compat.v1
_SERVER = "/job:worker/task:0"
_POLL_SECS = 0.01
_STATE_TIMEOUT_SECS = 3600  # the heartbeat ends the process sooner if the chief is missing


def reason_unreached(host: str, timeout_secs: float) -> str:
    """Returns the reason why no connection to host:port can be made from here; empty if one can."""
    name, _, port = host.rpartition(":")
    try:
        socket.create_connection((name.strip("[]"), int(port)), timeout_secs).close()
    except OSError as error:  # also if the name is unknown
        return error.strerror or str(error)
    return ""


def place(name: str, text: tf.Tensor | str) -> tuple[tf.Operation, tf.Tensor]:
    """Makes the operations that write a text to a place on the server of the default device, and read it."""
    handle = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=name, container="store")
    write = tf.raw_ops.AssignVariableOp(resource=handle, value=text)
    return write, tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)


class WorkerState(str, enum.Enum):
    """Progress of a worker. OVER is the chief's last state, GONE the others'."""

    STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
    OVER, GONE, FAILED = "over", "gone", "failed"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """A worker's row in the store."""

    start_id: str = ""  # identifies one start of the worker; empty until it has written its row
    chief: str = ""  # the start_id of the chief that it trains with, or means to
    members: tuple[str, ...] = ()  # over workers, the start_ids that train together, or ""; empty until all have agreed
    next_group: tuple[int, ...] | None = None  # the tasks that the chief expects at its next start
    heartbeat: int = 0  # their count
    state: WorkerState = WorkerState.STARTING
    step: int = 0  # the last one done
    stalled: str = ""  # what its step waits for, if it has not ended for --stall_timeout_secs
    stalled_secs: float = 0.0  # since then
    waiting_secs: float = 0.0  # for means over workers, if a program reports that
    facts: dict | None = None  # the chief's: what all workers must have in common, by name; None until it is known
    steps: tuple[int, int] | None = None  # the chief's: first and last one; None until they are known
    stopped_by: str | None = None  # what ended its steps; the chief's in state OVER: what ended the run
    failure: str = ""  # in state FAILED, the error's text
    exit_status: int = errors.WorkerError.exit_status  # and its exit status
    is_final: bool = False  # and whether it will not start itself again

    @property
    def group(self) -> tuple[int, ...]:
        """The tasks that train together."""
        return tuple(task for task, start_id in enumerate(self.members) if start_id)

    @property
    def has_mistake(self) -> bool:
        """Returns whether it has failed, and not because another worker was missing: it will not start itself again."""
        return self.state is WorkerState.FAILED and self.exit_status != errors.WorkerError.exit_status

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "WorkerStatus | None":
        """Reads a row; None if it is none."""
        try:
            values = {name: tuple(each) if type(each) is list else each for name, each in json.loads(text).items()}
            values["state"] = WorkerState(values["state"])
            defaults = {field.name: field.default for field in dataclasses.fields(cls)}
            has_types = all(
                defaults[name] is None or type(each) is type(defaults[name]) for name, each in values.items()
            )
            return cls(**values) if has_types else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None


class Store:
    """One worker's access to the store: a row for each worker's status, and a place for its part of a checkpoint.

    Args:
      target: the chief's server.
      task: this process's.
      timeout_secs: longest duration of an exchange.
      start_id: worker -> id of its start; workers except the chief know their own.
      pause: waits for so many seconds; WorkerError once a worker is missing.
    """

    def __init__(self, target: str, task: Task, timeout_secs: float, start_id: Callable, pause: Callable):
        self._target, self._task, self._start_id, self._pause, self._session = target, task, start_id, pause, None
        self._config = v1.ConfigProto(device_filters=[_SERVER], operation_timeout_in_ms=round(timeout_secs * 1000))
        self._read = range(len(task.hosts)) if task.is_chief else [0, task.index]
        self._last, self._named = [WorkerStatus()] * len(task.hosts), set()
        with tf.Graph().as_default() as self.graph, tf.device(f"{_SERVER}/cpu:0"):
            self._text = v1.placeholder(tf.string, [])
            self._rows, self._labels, self._states = (
                [place(f"{kind}/{i}", self._text) for i in range(len(task.hosts))] for kind in ("row", "label", "state")
            )

    def clear(self) -> None:
        """Empties all rows; for the chief, before any exchange."""
        self._run([write for write, _ in self._rows], WorkerStatus().to_json())

    def exchange(self, status: WorkerStatus | None) -> Sequence[WorkerStatus]:
        """Writes this worker's row, if given, and returns the rows it reads: the chief all, the others the chief's and
        their own. OpError if the server does not answer."""
        writes, text = ([self._rows[self._task.index][0]], status.to_json()) if status else ([], "")
        texts = self._run([*writes, *(self._rows[i][1] for i in self._read)], text)[len(writes) :]
        for i, row in zip(self._read, texts, strict=True):
            if not (read := WorkerStatus.from_json(row)) and i not in self._named:
                self._named.add(i)
                say(f"*** Ignored a status of {self._task.name(i)} that it did not write: {row[:80]!r}")
            self._last[i] = read or self._last[i]  # whoever reaches the server can write nonsense there
        return [self._last[i] for i in self._read]

    def hand_out(self, states: Sequence[bytes]) -> None:
        """Leaves, in the chief, the restored states, over workers; call it before any `fetch`."""
        for worker in range(1, len(states)):
            self._put(worker, "", states[worker])

    def fetch(self) -> bytes:
        """Takes, in another worker, its restored state."""
        return self._run(self._states[self._task.index][1], timeout_secs=_STATE_TIMEOUT_SECS)

    def send(self, step: int, state: bytes) -> None:
        """Leaves, in another worker, its state after a step, for the chief to `collect`."""
        self._put(self._task.index, self._label(self._task.index, step), state)

    def collect(self, step: int) -> list[bytes]:
        """Waits, in the chief, for all others' states after a step; returns them in order, or raises WorkerError."""
        states = []
        for worker in range(1, len(self._task.hosts)):
            while self._run(self._labels[worker][1], timeout_secs=_STATE_TIMEOUT_SECS) != self._label(worker, step):
                self._pause(_POLL_SECS)
            states.append(self._run(self._states[worker][1], timeout_secs=_STATE_TIMEOUT_SECS))
        return states

    def _label(self, worker: int, step: int) -> bytes:
        return f"{self._start_id(worker)} after step {step}".encode()

    def _put(self, worker: int, label: str | bytes, state: bytes) -> None:
        # The label comes last: once that is there, the state is.
        for (write, _), text in ((self._states[worker], state), (self._labels[worker], label)):
            self._run(write, text, _STATE_TIMEOUT_SECS)

    def _run(self, fetches, text: str | bytes = "", timeout_secs: float = 0):
        """Runs with an exchange's timeout, or another, and a text to write."""
        try:
            self._session = session = self._session or v1.Session(self._target, self.graph, self._config)
            return session.run(fetches, {self._text: text}, v1.RunOptions(timeout_in_ms=round(timeout_secs * 1000)))
        except tf.errors.OpError:
            self._session = None  # a failed session may not know a restarted server
            raise
