"""Programs with a session of their own as workers of a cluster: their rank, their devices, their end."""

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tower_train import __version__, errors
from tower_train.cluster import failures, membership
from tower_train.cluster.task import Policy, Task, find_task
from tower_train.config import DeviceOptions
from tower_train.console import notice
from tower_train.graph import devices
from tower_train.graph.collectives import Keys

v1 = tf.compat.v1

_IN_ONE_LINE = (errors.ConfigError, errors.RunError, errors.WorkerError)
_LOOK_SECS, _FREE_SECS, _GRACE_SECS = 1.0, 0.5, 5.0
_NEXT_STEP = (
    "The step under way is lost. Start the program again on every machine: it goes on from its last checkpoint, if it "
    "keeps one."
)
_current: "Cluster | None" = None


class Cluster:
    """This process among the workers that train together.

    It joins the cluster of its task and waits until all workers have; arguments and errors as for `init`.
    """

    def __init__(self, task: Task, placed: devices.Devices, policy: Policy, stall_timeout_secs: float):
        self.rank, self.size = task.index, len(task.hosts)  # this worker's index, from 0, and the number of workers
        self.is_chief = task.is_chief  # worker 0, which logs and saves
        self.local_rank, self.local_size = task.local  # among the workers of this machine, those with one host name
        self._is_in_main = threading.current_thread() is threading.main_thread()
        self._is_interrupting = False
        if self._is_in_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's job in the background
            signal.signal(signal.SIGINT, self._ignore)  # still ignored, but for `_interrupt`
        self.membership = membership.join(task, placed, policy, self._interrupt)
        self.target = self.membership.target  # for sessions: v1.train.MonitoredTrainingSession(master=cluster.target)
        self.devices = placed.towers  # strings, such as ('/gpu:0', '/gpu:1')
        # in the names of this worker's devices; sessions outside of the cluster, which would wait for ever, refuse it
        self.device = f"/job:worker/replica:0/task:{task.index}"
        self.counts = [0, 0]  # how often gradients arrived to be averaged, and how often their means were there
        self._is_open, self._ended = True, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=[stall_timeout_secs], name="means", daemon=True)
        self.membership.__enter__()
        try:
            self.membership.agree(lambda: {"tower_train": __version__, "TensorFlow": tf.__version__}, 0, 0)
        except BaseException as error:
            self.shutdown(error)
            raise
        if self.size > 1:
            self._thread.start()

    @property
    def session_config(self) -> v1.ConfigProto:
        """A new ConfigProto for this worker's sessions, all of which need its contents; it may be changed."""
        config = v1.ConfigProto()
        config.CopyFrom(self.membership.devices.session_config)
        return config

    @contextlib.contextmanager
    def operations(self, meaning: Mapping[str, str]) -> Iterator[None]:
        """Makes operations between workers within this block. They run once all workers have the same meaning: {name of
        what is sent: its dtype and shape}."""
        keys = Keys.of(v1.get_default_graph())
        keys.meaning |= meaning
        with tf.device(self.device), tf.control_dependencies([keys.compared(self.membership.agreement.compare)]):
            yield

    def shutdown(self, error: BaseException | None = None) -> None:
        """Leaves the cluster for good: waits until all have ended (WorkerError if one fails), or tells them of an
        error. Python calls it at a program's end."""
        if not self._is_open:
            return
        self._is_open = False
        self._ended.set()
        if self._thread.ident:
            self._thread.join()
        try:
            if error is None:
                self.membership.leave(None)
        except errors.UserError as failure:
            error = failure
            raise
        finally:
            self.membership.__exit__(type(error) if error else None, error, None)

    def _interrupt(self, error: errors.UserError) -> None:
        """Raises a KeyboardInterrupt in the program's main thread, also in a step; it stands for an error."""
        self._is_interrupting = True
        # Only the program knows the session whose step waits. TensorFlow closes none in whose step tensors of several
        # workers differ in size, and nothing else ends that step.
        closing = [threading.Thread(target=each.close, daemon=True) for each in self._sessions()]
        for thread in closing:
            thread.start()
        # A step that was freed ends by an error of TensorFlow's, which takes no other meanwhile.
        if not self._ended.wait(_FREE_SECS) and self._is_open and self._is_in_main:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if not self._ended.wait(_GRACE_SECS) and any(thread.is_alive() for thread in closing):
            notice(f"error: {error}")
            os._exit(error.exit_status)

    def _ignore(self, number: int, frame: object) -> None:
        """Ignores a SIGINT, except the one that stands for an error."""
        if self._is_interrupting:
            raise KeyboardInterrupt

    def _sessions(self) -> list[v1.Session]:
        """Returns this program's open sessions on its worker's server; TensorFlow keeps no list of them."""
        kinds, target = (v1.Session, v1.InteractiveSession), self.target.encode()
        sessions = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
        return [each for each in sessions if each.sess_str == target and each.graph is not self.membership.store.graph]

    def _watch(self, stall_timeout_secs: float) -> None:
        """Tells the others, in a thread, how many means there were, and what this worker waits for since."""
        counts, since, is_over = self.counts[:], time.monotonic(), False
        while not is_over:  # the last look is after the end, to tell the others
            is_over = self._ended.wait(_LOOK_SECS)
            if counts != self.counts or not counts[0]:
                counts, since = self.counts[:], time.monotonic()
            arrived, averaged = counts
            waits, seconds = arrived > averaged, time.monotonic() - since
            self.membership.note_means(averaged, seconds if waits else 0.0)
            is_stalled = 0 < stall_timeout_secs < seconds
            what = failures.FOR_AVERAGING if waits else failures.FOR_PROGRAM
            self.membership.note_stall(*((what, seconds - stall_timeout_secs) if is_stalled else ("", 0.0)))


def init(
    num_gpus: int | None = None,
    gpus: tuple[int, ...] | None = None,
    worker_timeout_secs: float = 30.0,
    start_timeout_secs: float = 1800.0,
    stall_timeout_secs: float = 1800.0,
    task: Task | None = None,
    placed: devices.Devices | None = None,
) -> Cluster:
    """Makes this process a worker of its cluster, and waits until all are there. Call it before anything else that uses
    a device; later calls return the same Cluster.

    TF_CONFIG or Slurm's variables say which worker it is; without them it is alone, in a cluster of size 1. By default
    the workers of one machine divide its GPUs among them. A worker that dies or sends no heartbeats is named by the
    others in one line, and all end with status 138. An exception that ends one ends all.

    Args:
      num_gpus: devices for towers in this worker: GPUs, or logical CPU devices if there are none.
      gpus: this machine's GPUs that this worker uses, by number; () for none.
      worker_timeout_secs: seconds without a heartbeat after which a worker is missing.
      start_timeout_secs: seconds to wait for workers that have not started.
      stall_timeout_secs: seconds that workers wait for another one's gradients before they end, after
        worker_timeout_secs more, and name it; 0: for ever.
      task, placed: this process's task and devices, if they have been chosen already.

    Raises ConfigError if TF_CONFIG, Slurm's variables, GPUs or the versions of the chief contradict, RunError without
    the worker's port, and WorkerError if a worker does not start, or has failed.
    """
    global _current
    if _current is None:
        leave_by_status()
        task = task or find_task(None, None)
        placed = placed or devices.place(_device_options(task, num_gpus, gpus), local=task.local)
        policy = Policy(worker_timeout_secs, start_timeout_secs, next_step=_NEXT_STEP)
        _current = Cluster(task, placed, policy, stall_timeout_secs)
    return _current


def is_initialized() -> bool:
    """Returns whether `init` has made the cluster."""
    return _current is not None


def current() -> Cluster:
    """Returns the cluster that `init` made; GraphError before that."""
    if _current is None:
        raise errors.GraphError("This program is in no cluster yet. Call tower_train.cluster.init() first.")
    return _current


@functools.cache
def leave_by_status() -> None:
    """Makes an uncaught UserError end the program with the error's status, in one line if it names a worker or an
    option; the cluster is told of it and explains it. A program that ends waits for the others."""
    before = sys.excepthook

    def explain(kind, error, trace):
        if _current:
            error = _explained(error, _current)
            _current.shutdown(error)
        if isinstance(error, _IN_ONE_LINE):
            notice(f"error: {error}")
        else:
            before(kind, error, trace)
        if isinstance(error, errors.UserError):
            raise SystemExit(error.exit_status)  # Python takes it from here as from the program

    def leave():
        try:
            if _current:
                _current.shutdown()
        except errors.UserError as error:
            notice(f"error: {error}")
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(error.exit_status)  # the program has ended: Python takes no status any more

    sys.excepthook = explain
    atexit.register(leave)


def _explained(error: BaseException, cluster: Cluster) -> BaseException:
    """Returns the error behind one of TensorFlow's: a session outside of the cluster, or another worker's failure."""
    text = error.message if isinstance(error, tf.errors.InvalidArgumentError) else ""
    if cluster.target and "/job:worker" in text and "/job:localhost" in text:  # operations of Cluster.device
        return errors.ConfigError(
            "A session was opened in which there are no other workers. Open it with master=cluster.target, which "
            f"is {cluster.target!r}."
        )
    is_of_variables = isinstance(error, tf.errors.FailedPreconditionError) and not failures.is_of_earlier_start(error)
    may_be_anothers = isinstance(error, (tf.errors.OpError, RuntimeError, KeyboardInterrupt)) and not is_of_variables
    return cluster.membership.failure_behind(error) if may_be_anothers else error


def _device_options(task: Task, num_gpus: int | None, gpus: tuple[int, ...] | None) -> DeviceOptions:
    """Returns the options of `init`, by default this worker's share of its machine's GPUs."""
    if gpus is not None:
        return DeviceOptions(num_gpus=num_gpus, gpus=tuple(gpus) or None, device="auto" if gpus else "cpu")
    here = len(tf.config.list_physical_devices("GPU"))
    return DeviceOptions(num_gpus=num_gpus or max(1, here // task.local[1]))
