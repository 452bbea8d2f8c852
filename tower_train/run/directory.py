"""The files of a run besides its checkpoints and event files: lock, run.json, metrics.jsonl, result.json."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator

from tower_train import errors

RUN, METRICS, RESULT, LOCK = "run.json", "metrics.jsonl", "result.json", ".lock"


class RunDirectory:
    """A train_dir. JSON files are replaced as a whole, so that a reader never sees half of one."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory and keeps other trainers out of it. The lock dies with its process.

        Raises:
          RunError: the directory cannot be made or written to, or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+")
        except OSError as error:
            raise errors.RunError(
                f"--train_dir={self.path} cannot be written to ({error.strerror}). Give a directory that can."
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise errors.RunError(
                    f"--train_dir={self.path} is in use by another trainer (process {holder}). "
                    "Wait for it, stop it, or give another directory."
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def read(self, name: str) -> dict:
        """A JSON file's content; empty where there is none.

        Raises:
          RunError: the file is not JSON.
        """
        try:
            content = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise errors.RunError(f"{self.path / name} cannot be read ({error}). Move it away or mend it.") from None
        if not isinstance(content, dict):
            raise errors.RunError(f"{self.path / name} holds no JSON object. Move it away or mend it.")
        return content

    def write(self, name: str, content: dict) -> None:
        """Replaces a JSON file."""
        self._replace(name, json.dumps(content, indent=2) + "\n")

    def update(self, name: str, content: dict) -> None:
        """Replaces some entries of a JSON file that other processes update too."""
        with open(self.path / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write(name, self.read(name) | content)

    def is_locked(self) -> bool:
        """Whether a trainer is at work here."""
        try:
            with open(self.path / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def cut_metrics(self, last_step: int) -> None:
        """Drops the metrics of steps after last_step, which will be done again, and of a half-written last line."""
        try:
            lines = (self.path / METRICS).read_text().splitlines()
        except FileNotFoundError:
            return
        kept = [line for line in lines if _step_of(line) <= last_step]
        if len(kept) < len(lines):
            self._replace(METRICS, "".join(line + "\n" for line in kept))

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
