"""The files of a run besides its checkpoints and event files: lock, run.json, metrics.jsonl, result.json, best.json."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator

from tower_train import errors, files
from tower_train.console import one_line, say
from tower_train.run_dir import disk, json_files
from tower_train.run_dir.json_files import METRICS, RESULT, RUN

LOCK, BEST_FOLDER, EXAMPLE_IMAGES = ".lock", "best", "examples.png"
_UPDATE_LOCK = ".result.json.lock"
_LOCK_TRIES, _LOCK_PAUSE_SECS = 5, 0.05
# Files and folders that a run writes to while it trains.
_WRITTEN = re.compile(
    r"\.lock|\.?(run|result|best)\.json.*|metrics\.jsonl|checkpoint|model\.ckpt-.*|events\.out\..*|best|plugins|eval.*"
)
# Files of a start that failed before its first step, useless without one.
_OF_A_START = re.compile(
    rf"{re.escape(LOCK)}|{re.escape(RUN)}|\.{re.escape(RUN)}\.[0-9a-f]{{8}}|{re.escape(EXAMPLE_IMAGES)}|events\.out\.tfevents\..*"
)


class RunDirectory:
    """A train_dir. JSON files are replaced as a whole, so readers never see half of one."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        self._lock = None  # open while this process holds it

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory and locks it against other trainers, until the process ends. If the block fails before it
        writes anything of use, its files are removed again. RunError if the directory cannot be made, written to or
        read by TensorFlow, or another process trains in it."""
        _check_path(self.path)
        with contextlib.ExitStack() as stack:
            try:
                before = os.listdir(self.path) if self.path.is_dir() else []
                stack.enter_context(files.made(self.path))
                self._take_lock()
            except OSError as error:
                raise errors.RunError(
                    f"--train_dir={one_line(self.path)} cannot be written to ({error.strerror}). Give a directory "
                    "that can."
                ) from None
            stack.callback(lambda: self._lock.close())
            try:
                yield
            except BaseException:
                if RUN not in before:
                    self._remove_start(before)
                raise

    def _remove_start(self, before: list[str]) -> None:
        """Removes the files of a failed start, except those named in `before`, unless some are of use."""
        with contextlib.suppress(OSError):
            new = set(os.listdir(self.path)) - set(before)
            if all(map(_OF_A_START.fullmatch, new)):
                for name in new:
                    os.remove(self.path / name)

    def check_held(self) -> None:
        """Raises OSError if the locked directory was deleted; another trainer may have begun in a new one."""
        if not files.is_at(self._lock, self.path / LOCK):
            raise FileNotFoundError(errno.ENOENT, "the directory was deleted or moved; move it back", str(self.path))

    def check_links(self) -> None:
        """Raises RunError for a link in the place of what a run writes, by which a stranger's run would overwrite other
        files; or if the directory cannot be read."""
        try:
            names = os.listdir(self.path) if self.path.is_dir() else []
            links = [self.path / name for name in names if _WRITTEN.fullmatch(name)]
            for folder, folders, names in itertools.chain.from_iterable(map(os.walk, links)):
                links += [pathlib.Path(folder, name) for name in (*folders, *names)]
        except OSError as error:
            raise errors.RunError(f"{one_line(self.path)} cannot be read ({error.strerror}).") from None
        for path in filter(os.path.islink, links):
            raise errors.RunError(
                f"{one_line(path)} is a symbolic link, and a run is written to in its own directory only. Move it "
                "away, or put what it points to in its place."
            )

    def _take_lock(self) -> None:
        """Raises OSError if the lock's file cannot be opened, RunError if the lock is taken."""
        path = self.path / LOCK
        for _ in range(_LOCK_TRIES):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = files.open_in_run(path, "a+b")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if files.is_at(lock, path):  # and was not removed by a start that failed
                    with contextlib.suppress(OSError):  # a full disk: the lock holds, without the holder's name
                        lock.truncate(0)
                        lock.write(str(os.getpid()).encode())
                    self._lock = lock
                    return
            lock.close()
            time.sleep(_LOCK_PAUSE_SECS)  # `is_locked` holds it for a moment
        number = files.read_in_run(path)[:20].strip()
        raise errors.RunError(
            f"--train_dir={one_line(self.path)} is in use by another trainer (process "
            f"{number.decode() if number.isdigit() else 'unknown'}). Wait for it, stop it, or give another directory."
        )

    def is_locked(self) -> bool:
        """Returns whether a trainer is running in the directory."""
        try:
            with files.open_in_run(self.path / LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # missing or unreadable
            return False
        return False

    def has_ended(self) -> bool:
        """Returns whether the last start of the run wrote its result; false if it trains, was killed or crashed."""
        if self.is_locked():
            return False
        result, start = self.read(RESULT), self.read(RUN).get("started")
        return "stopped_by" in result and result.get("started") == start

    def read(self, name: str) -> dict:
        """Returns a JSON file's content; see json_files.read."""
        return json_files.read(self.path / name)

    def write(self, name: str, content: dict) -> None:
        """Replaces a JSON file. Raises RunError if it cannot be written; the file stays as it was."""
        with self._errors_named(name):
            disk.replace(self.path / name, json.dumps(content, indent=2).encode() + b"\n")

    def write_image(self, name: str, content: bytes) -> None:
        """Replaces a picture, or says that it cannot."""
        try:
            disk.replace(self.path / name, content)
        except OSError as error:
            say(f"*** {one_line(self.path / name)} cannot be written ({error.strerror}). The run goes on without it.")

    def update(self, name: str, content: dict) -> None:
        """Replaces entries of a JSON file, also beside other processes that do so; raises as `read` and `write`."""
        with self._errors_named(name), files.open_in_run(self.path / _UPDATE_LOCK, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write(name, self.read(name) | content)

    def records(self) -> dict[bytes, dict]:
        """Returns {line: record} of metrics.jsonl, without lines that are none; RunError if it cannot be read."""
        with self._errors_named(METRICS), contextlib.suppress(FileNotFoundError):
            lines = files.read_in_run(self.path / METRICS).split(b"\n")
            return {line: record for line in lines if (record := json_files.record(line))}
        return {}

    def cut_metrics(self, last_step: int, is_evaluated_again: bool = False) -> None:
        """Drops the metrics of steps after last_step, its evaluation if that is done again, and an incomplete last
        line; RunError if the file cannot be read or written."""
        lines = [
            line + b"\n"
            for line, record in self.records().items()
            if record["step"] <= last_step
            and not (is_evaluated_again and record["step"] == last_step and json_files.is_evaluation(record))
        ]
        with self._errors_named(METRICS), contextlib.suppress(FileNotFoundError):
            if os.path.getsize(self.path / METRICS) != sum(map(len, lines)):
                disk.replace(self.path / METRICS, b"".join(lines))

    @contextlib.contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Converts an OSError into a RunError that names the file."""
        try:
            yield
        except OSError as error:
            raise errors.RunError(
                f"{one_line(self.path / name)} cannot be written ({error.strerror}). Make room, or give another "
                "directory."
            ) from None


def _check_path(path: pathlib.Path) -> None:
    """Raises RunError for a path that TensorFlow cannot read checkpoints from."""
    text = str(path)
    if set("*?[\\") & set(text) or text != text.encode(errors="replace").decode():
        raise errors.RunError(
            f"--train_dir={one_line(path)}: TensorFlow takes *, ?, [ and \\ in a checkpoint's path for a pattern, and "
            "reads names in UTF-8 only. Give a directory of another name."
        )
