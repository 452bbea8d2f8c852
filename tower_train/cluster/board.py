"""What the processes of a cluster tell each other beside the training: rows of text on the chief's server."""

import json
from collections.abc import Sequence

import tensorflow as tf

v1 = tf.compat.v1
_JOB = "worker"


class Board:
    """One process's access to the rows, one a worker, which are string variables on the chief's TensorFlow server."""

    def __init__(self, target: str, num_workers: int, index: int, timeout_secs: float):
        """Args: the chief's server; how many workers there are, and which this is; how long one exchange may take."""
        self._target, self._index = target, index
        read = range(num_workers) if index == 0 else [0]  # the chief looks at all, the others at the chief
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
                self._read = [tf.raw_ops.ReadVariableOp(resource=rows[i], dtype=tf.string) for i in read]

    def clear(self) -> None:
        """Empties all rows; for the chief, before any exchange."""
        self._run(self._clear)

    def exchange(self, row: dict) -> Sequence[dict]:
        """Writes this worker's row and returns those it may see: the chief all of them, the others the chief's.

        Raises:
          OpError: the chief did not answer in time.
        """
        return [json.loads(text) for text in self._run(self._read, {self._text: json.dumps(row)})]

    def _run(self, fetches, feed=None):
        try:
            self._session = self._session or v1.Session(self._target, self._graph, self._config)
            return self._session.run(fetches, feed)
        except tf.errors.OpError:
            self._session = None  # one that failed once may not know a server that was started again
            raise
