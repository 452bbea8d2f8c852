"""The status board of a cluster: one row of text per worker, on the chief's TensorFlow server."""

import dataclasses
import enum
import json
from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1
_JOB = "worker"


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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerStatus":
        """Reads a row; fields of other versions of this program are left out."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in json.loads(text).items() if name in names}
        return cls(**known | ({"state": WorkerState(known["state"])} if "state" in known else {}))


class StatusBoard:
    """One process's access to the rows, which are string variables on the chief's server, the target.

    An exchange may take timeout_secs.
    """

    def __init__(self, target: str, num_workers: int, index: int, timeout_secs: float):
        self._target = target
        rows_read = range(num_workers) if index == 0 else [0]  # the chief reads all, the others the chief's
        self._config = v1.ConfigProto(
            device_filters=[f"/job:{_JOB}/task:0"], operation_timeout_in_ms=round(timeout_secs * 1000)
        )
        self._session = None
        with tf.Graph().as_default() as self._graph, tf.device(f"/job:{_JOB}/task:0/cpu:0"):
            rows = [tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=f"row/{i}", container="board")
                    for i in range(num_workers)]  # fmt: skip
            self._text = v1.placeholder(tf.string, [])
            self._clear = tf.group(*[tf.raw_ops.AssignVariableOp(resource=row, value="{}") for row in rows])
            written = tf.raw_ops.AssignVariableOp(resource=rows[index], value=self._text)
            with tf.control_dependencies([written]):
                self._read = [tf.raw_ops.ReadVariableOp(resource=rows[i], dtype=tf.string) for i in rows_read]

    def clear(self) -> None:
        """Empties all rows; for the chief, before any exchange."""
        self._run(self._clear)

    def exchange(self, status: WorkerStatus) -> Sequence[WorkerStatus]:
        """Writes this worker's row and returns those it may read: the chief all, the others the chief's; or OpError."""
        return [WorkerStatus.from_json(text) for text in self._run(self._read, {self._text: status.to_json()})]

    def _run(self, fetches, feed=None):
        try:
            self._session = self._session or v1.Session(self._target, self._graph, self._config)
            return self._session.run(fetches, feed)
        except tf.errors.OpError:
            self._session = None  # a failed session may not know a restarted server
            raise
