"""The exchange of the workers' parts of a checkpoint, which only the chief reads and writes.

Each worker has a place on the chief's TensorFlow server, for its part of the restored checkpoint from the chief, and
its part of the next one. So no files are shared.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

v1 = tf.compat.v1
_SERVER = "/job:worker/task:0"
_POLL_SECS = 0.01


class StateExchange:
    """The states of all workers, as bytes, on the chief's server.

    Args:
      target: the chief's server.
      num_workers: with the chief.
      worker: index of this one.
      start_of: worker -> id of its start; workers but the chief know their own.
      pause: waits for so many seconds; raises WorkerError once a worker is missing.
    """

    def __init__(
        self, target: str, num_workers: int, worker: int, start_of: Callable[[int], str], pause: Callable[[float], None]
    ):
        self._target, self._others, self._worker = target, range(1, num_workers), worker
        self._start_of, self._pause, self._session = start_of, pause, None
        with tf.Graph().as_default() as self._graph, tf.device(f"{_SERVER}/cpu:0"):
            self._abouts, self._states = ([_place(f"{what}/{i}") for i in range(num_workers)]
                                          for what in ("about", "state"))  # fmt: skip

    def hand_out(self, states: Sequence[bytes]) -> None:
        """Leaves, in the chief, the restored states, over workers; call it before any `fetch`."""
        for worker in self._others:
            self._put(worker, "", states[worker])

    def fetch(self) -> bytes:
        """Takes, in another worker, its restored state."""
        return self._run(self._states[self._worker].value)

    def send(self, step: int, state: bytes) -> None:
        """Leaves, in another worker, its state after a step, for the chief to `collect`."""
        self._put(self._worker, self._about(self._worker, step), state)

    def collect(self, step: int) -> list[bytes]:
        """Waits, in the chief, for all others' states after a step; returns them in order, or raises WorkerError."""
        states = []
        for worker in self._others:
            while self._run(self._abouts[worker].value).decode() != self._about(worker, step):
                self._pause(_POLL_SECS)
            states.append(self._run(self._states[worker].value))
        return states

    def _about(self, worker: int, step: int) -> str:
        return f"{self._start_of(worker)} after step {step}"

    def _put(self, worker: int, about: str, state: bytes) -> None:
        # Its label comes last: once that is there, the state is.
        for place, text in ((self._states[worker], state), (self._abouts[worker], about)):
            self._run(place.assignment, {place.text: text})

    def _run(self, fetches, feed=None):
        if not self._session:
            self._session = v1.Session(self._target, self._graph, v1.ConfigProto(device_filters=[_SERVER]))
        return self._session.run(fetches, feed)


class _Place(NamedTuple):
    """The ops of a text on the server."""

    text: tf.Tensor
    assignment: tf.Operation
    value: tf.Tensor


def _place(name: str) -> _Place:
    place = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=name, container="states")
    text = v1.placeholder(tf.string, [])
    assignment = tf.raw_ops.AssignVariableOp(resource=place, value=text)
    return _Place(text, assignment, tf.raw_ops.ReadVariableOp(resource=place, dtype=tf.string))
