"""The files of a run besides its checkpoints and event files: lock, run.json, metrics.jsonl, result.json, best.json."""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator

from tower_train import errors, locks

RUN, METRICS, RESULT, BEST, LOCK = "run.json", "metrics.jsonl", "result.json", "best.json", ".lock"
_LOCK_TRIES, _LOCK_PAUSE_SECS = 5, 0.05
# Files that are of no use without a step: of a start that has failed before its first.
_OF_A_START = re.compile(rf"{re.escape(LOCK)}|{re.escape(RUN)}|\.{re.escape(RUN)}\.\d+|events\.out\.tfevents\..*")


class RunDirectory:
    """A train_dir. JSON files are replaced as a whole, so that a reader never sees half of one."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        self._lock = None  # open while this process holds it
        self._run_json = None  # its text as last written

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory and keeps other trainers out of it. The lock dies with its process.

        If the block fails before anything of use is written, all that was not there before is removed again.

        Raises:
          RunError: the directory cannot be made, written to or read by TensorFlow, or another process trains in it.
        """
        _check_path(self.path)
        with contextlib.ExitStack() as stack:
            try:
                before = os.listdir(self.path) if self.path.is_dir() else []
                stack.enter_context(locks.made(self.path))
                self._take_lock()
            except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
                raise errors.RunError(
                    f"--train_dir={_shown(self.path)} cannot be written to ({getattr(error, 'strerror', None) or error}"
                    "). Give a directory that can."
                ) from None
            stack.callback(lambda: self._lock.close())
            try:
                yield
            except BaseException:
                if RUN not in before:
                    self._remove_start(before)
                raise

    def _remove_start(self, before: list[str]) -> None:
        """Removes the files of a start that has failed, unless it leaves some of use. before: those that were there."""
        with contextlib.suppress(OSError):
            new = set(os.listdir(self.path)) - set(before)
            if all(map(_OF_A_START.fullmatch, new)):
                for name in new:
                    os.remove(self.path / name)

    def keep(self) -> None:
        """Makes the directory and its run.json again if they were deleted, for the trainer that holds the lock.

        Raises:
          OSError: they cannot be made.
          RunError: another trainer has begun in the directory meanwhile.
        """
        if locks.is_at(self._lock, self.path / LOCK):
            return
        gone = self._lock
        self._take_lock()
        gone.close()
        if self._run_json and not (self.path / RUN).exists():
            self._replace(RUN, self._run_json)

    def warnings(self) -> list[str]:
        """A line if other users may change the files that a run trusts: its checkpoints and run.json."""
        status = os.stat(self.path)
        if status.st_mode & stat.S_IWOTH:
            return [f"*** --train_dir={_shown(self.path)} can be written to by every user of this machine."]
        if status.st_uid not in (os.getuid(), 0):
            return [f"*** --train_dir={_shown(self.path)} belongs to another user (number {status.st_uid})."]
        return []

    def _take_lock(self) -> None:
        """Raises OSError if the lock's file cannot be opened, RunError if the lock is taken."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+")
            try:
                _lock_exclusively(lock)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                lock.close()
                raise errors.RunError(
                    f"--train_dir={_shown(self.path)} is in use by another trainer (process {holder}). "
                    "Wait for it, stop it, or give another directory."
                ) from None
            except OSError:
                lock.close()
                raise
            if locks.is_at(lock, self.path / LOCK):
                break
            lock.close()  # of a start that failed and has removed it
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only nobody is named
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        self._lock = lock

    def read(self, name: str) -> dict:
        """A JSON file's content; empty if there is no such file.

        Raises:
          RunError: the file is not JSON.
        """
        try:
            content = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise errors.RunError(f"{self.path / name} cannot be read ({error}). Move it away or mend it.") from None
        if not isinstance(content, dict):
            raise errors.RunError(f"{self.path / name} holds no JSON object. Move it away or mend it.")
        return content

    def write(self, name: str, content: dict) -> None:
        """Replaces a JSON file.

        Raises:
          RunError: it cannot be written; it stays as it was.
        """
        text = json.dumps(content, indent=2) + "\n"
        with _errors_named(self.path / name):
            self._replace(name, text)
        if name == RUN:
            self._run_json = text

    def update(self, name: str, content: dict) -> None:
        """Replaces some entries of a JSON file that other processes may update at the same time.

        Raises:
          RunError: as `read` and `write`.
        """
        with _errors_named(self.path / name), open(self.path / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write(name, self.read(name) | content)

    def is_locked(self) -> bool:
        """Whether a trainer is at work here."""
        try:
            with contextlib.suppress(FileNotFoundError), open(self.path / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def cut_metrics(self, last_step: int) -> None:
        """Drops the metrics of steps after last_step, which will be done again, and a half-written last line.

        Raises:
          RunError: the file cannot be read or written.
        """
        with _errors_named(self.path / METRICS):
            try:
                text = (self.path / METRICS).read_bytes().decode(errors="replace")
            except FileNotFoundError:
                return
            kept = "".join(line + "\n" for line in text.splitlines() if _step_of(line) <= last_step)
            if kept != text:
                self._replace(METRICS, kept)

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            with open(temporary, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise


def _check_path(path: pathlib.Path) -> None:
    """Raises RunError for a path that TensorFlow cannot read checkpoints from."""
    if set("*?[\\") & set(str(path)):
        raise errors.RunError(
            f"--train_dir={_shown(path)}: TensorFlow takes *, ?, [ and \\ in a checkpoint's path for a pattern. Give a "
            "directory without them."
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise errors.RunError(
            f"--train_dir={_shown(path)}: TensorFlow takes paths in UTF-8 only. Give a directory of such a name."
        ) from None


def _lock_exclusively(file) -> None:
    """Raises BlockingIOError if another process keeps its lock; `is_locked` holds one for a moment only."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE_SECS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _errors_named(path: pathlib.Path) -> Iterator[None]:
    """Converts an OSError into a RunError that names the file."""
    try:
        yield
    except OSError as error:
        raise errors.RunError(
            f"{_shown(path)} cannot be written ({error.strerror}). Make room, or give another directory."
        ) from None


def _shown(path: pathlib.Path) -> str:
    """A path in one printable line, whatever bytes it holds."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinite if the line has none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
