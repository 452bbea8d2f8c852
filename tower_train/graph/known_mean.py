"""Known means: a trial of the very all-reduce of a run's steps, before the first of them.

NCCL in TensorFlow was reported to give wrong means without any error (tensorflow#41539, #62493).
"""

import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.all_reduce import MESSAGE_BYTES, TRIAL, AllReduce
from tower_train.graph.devices import HOST

v1 = tf.compat.v1

_SMALL, _VALUES = 1000, 8  # elements of a small message; different values in a message
_TOLERANCE = 0.01  # relative: bfloat16 rounds to 0.004, and the values differ by more than a tenth
_MOST_SECS, _GRACE_SECS = 10**6, 10.0
_NEXT_TRY = {
    "nccl": "Try --all_reduce=collective.",
    "collective": "Try --all_reduce=add_n, or --variable_update=cpu.",
    "add_n": "Try --variable_update=cpu.",
}


class KnownMean:
    """A large message and small ones whose means are known.

    Of n devices of all workers, only the one with index j % n has a number at place j, the others 0: so a part that is
    lost, repeated or misplaced shows, and whose it is, despite rounding.
    """

    def __init__(self, of_steps: AllReduce, worker: int, dtype: tf.DType):
        """Builds the messages.

        Args:
          of_steps: the all-reduce of the steps.
          worker: index of this one.
          dtype: of the gradients.
        """
        self._devices, self._num_workers, self._kind = of_steps.devices, of_steps.num_workers, of_steps.kind
        self._count = len(self._devices) * self._num_workers
        first = of_steps.first_instance + TRIAL
        all_reduce = AllReduce(self._devices, self._kind, of_steps.dtype, self._num_workers, first)
        self._means, self._sent = [], (of_steps.dtype or dtype).name
        # Between workers each message takes another device.
        sizes = [MESSAGE_BYTES // dtype.size, *[_SMALL] * max(1, len(self._devices) - 1)]
        with v1.name_scope("known_mean"):
            for size in sizes:
                with tf.device(HOST):
                    # Nothing here is a constant, or TensorFlow would compute the means beforehand, on the host.
                    places = tf.range(size) + v1.placeholder_with_default(0, [])
                    numbers = tf.cast(1 + places // self._count % _VALUES, dtype)
                message = []
                for i, device in enumerate(self._devices):
                    with tf.device(HOST):
                        own = tf.equal(places % self._count, worker * len(self._devices) + i)
                        part = tf.where(own, numbers, tf.zeros_like(numbers))
                    with tf.device(device):
                        message.append([tf.identity(part)])
                self._means.append([mean for [mean] in all_reduce.mean(message)])

    def check(
        self, session: v1.Session, timeout_secs: float, leave_at_once: Callable[[errors.WorkerError], None]
    ) -> None:  # fmt: skip
        """Averages the messages and compares; all workers must do so at the same time.

        Args:
          session: to run in.
          timeout_secs: time limit of the all-reduce.
          leave_at_once: ends the process if TensorFlow does not return after that, as from a running kernel.

        Raises:
          AllReduceError: a mean is wrong.
          WorkerError: the all-reduce does not end.
        """
        timeout_secs = min(timeout_secs, _MOST_SECS)
        late = errors.WorkerError(
            f"The averaging {self._between()} has not ended for {timeout_secs:g} s, before the first step: not all "
            f"of them take part. {self._next_try()}"
        )
        leaving = threading.Timer(timeout_secs + _GRACE_SECS, leave_at_once, [late])
        leaving.daemon = True
        leaving.start()
        try:
            found = session.run(self._means, options=v1.RunOptions(timeout_in_ms=round(timeout_secs * 1000)))
        except tf.errors.DeadlineExceededError as error:
            raise late from error
        finally:
            leaving.cancel()
        for means in found:
            for device, mean in zip(self._devices, means, strict=True):
                self._compare(device, mean.astype(np.float64))

    def _compare(self, device: str, mean: np.ndarray) -> None:
        places = np.arange(len(mean))
        expected = (1 + places // self._count % _VALUES) / self._count
        wrong = np.flatnonzero(~(np.abs(mean - expected) <= _TOLERANCE * expected))
        if len(wrong):
            first = int(wrong[0])
            raise errors.AllReduceError(
                f"The averaging {self._between()} is wrong, before the first step: of {len(mean):,} known means "
                f"{len(wrong):,} differ on {device}; place {first}, which only {self._owner(first % self._count)} adds "
                f"to, came out as {mean[first]:g}, expected was {expected[first]:g}. {self._next_try()}"
            )

    def _between(self) -> str:
        of_workers = f" of each of {self._num_workers} workers" if self._num_workers > 1 else ""
        return f"between {', '.join(self._devices)}{of_workers} ({self._kind}, {self._sent})"

    def _owner(self, index: int) -> str:
        worker, device = divmod(index, len(self._devices))
        return self._devices[device] + (f" of worker {worker}" if self._num_workers > 1 else "")

    def _next_try(self) -> str:
        return "Look at the network between the workers." if self._devices == (HOST,) else _NEXT_TRY[self._kind]
