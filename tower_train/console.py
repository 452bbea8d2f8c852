"""All output for people: through the logger `tower_train`, with progress bars below.

Its handler prints, lines on standard output and notices on standard error. A program silences it by
`logging.getLogger("tower_train").setLevel(logging.WARNING)`, or gives it other handlers. A full disk or a closed pipe
behind it does not end a run. TensorFlow is imported by `import_tensorflow` only.
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, TextIO

from tower_train import host

_LOGGER = logging.getLogger("tower_train")
_noticed: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # {(id, kind): what a notice_once was about}
_bars: list[Any] = []  # rich's, on a terminal now, the innermost last


def say(*lines: str) -> None:
    """Logs lines; they are printed on standard output, above the progress bar if there is one."""
    for line in lines:
        _LOGGER.info("%s", _writable(line))


def notice(text: str) -> None:
    """Logs a warning for the person who started the program; it is printed on standard error, whatever the program's
    output is for."""
    _LOGGER.warning("%s", _writable(text))


def _writable(text: str) -> str:
    """Returns a text whose other characters than printable ones and line ends are escapes: names of files and classes
    may hold undecodable bytes, and what a terminal obeys."""
    return "\n".join(map(one_line, text.split("\n")))


class _Printer(logging.Handler):
    """Prints, on the standard streams of the moment."""

    def emit(self, record):
        if record.levelno < logging.WARNING:
            _print(sys.stdout, record.getMessage())
        else:
            _print(sys.stderr, f"{_LOGGER.name}: {record.getMessage()}")


def notice_once(subject: Any, text: str, kind: str = "") -> None:
    """Prints a notice about an object, such as a variable, unless there has been one of this kind."""
    if _noticed.get((id(subject), kind)) is not subject:
        _noticed[id(subject), kind] = subject
        notice(text)


def _print(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # Paths may hold undecodable bytes, and names letters that a terminal lacks.
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    with contextlib.suppress(OSError):
        if _bars and stream.isatty():
            _bars[-1].console.print(text, markup=False, highlight=False, soft_wrap=True)  # above the bar
        else:
            print(text, file=stream, flush=True)


if not _LOGGER.handlers:  # else the program has given it some already
    _LOGGER.addHandler(_Printer())
    _LOGGER.setLevel(_LOGGER.level or logging.INFO)  # a level that the program has set stays
    _LOGGER.propagate = False  # or lines would be there twice, once a program sets up the root logger


def enumeration(names: Sequence[str], most: int) -> str:
    """Returns names in one line, at most so many, with the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def one_line(text: str | os.PathLike) -> str:
    """Returns a text or a path in printable characters, with escapes for line ends, undecodable bytes and the like."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in os.fspath(text))


def count(text: str) -> int:
    """Reads a whole number above 0, for programs whose options argparse reads."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def import_tensorflow(talkative: bool = False) -> None:
    """Imports TensorFlow in a command, whose process is ours, without C++'s remarks on the processor and the like.

    They stay if `talkative`, and on a machine with an NVIDIA driver, since they say what TensorFlow finds there.
    """
    if "tensorflow" in sys.modules:
        return
    if not talkative and not host.nvidia_driver():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what fails is an exception anyway
    gc.disable()  # a fifth of the import
    try:
        import tensorflow  # noqa: F401
    finally:
        gc.freeze()  # what the import made stays; looking through it takes a tenth of building a graph
        gc.enable()


class ProgressBar:
    """The bar of a run at the bottom of a terminal, which repeats the last log line's rates, as log lines scroll away
    above it; nothing on other streams. Use as a context manager."""

    def __init__(self, steps_done: int, last_step: int):
        self._bar: Any = None
        self.is_shown = sys.stdout.isatty()
        if self.is_shown:
            from rich import console, progress  # comes with Keras, hence with TensorFlow

            columns = (
                progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[rates]}"),
                progress.TimeRemainingColumn(),
                progress.TextColumn("left"),
            )
            self._bar = progress.Progress(*columns, console=console.Console(file=sys.stdout), transient=True)
            self._task = self._bar.add_task("", total=last_step, completed=steps_done, rates="")

    def __enter__(self):
        if self._bar:
            self._bar.start()
            _bars.append(self._bar)
        return self

    def __exit__(self, *_):
        if self._bar:
            _bars.remove(self._bar)
            self._bar.stop()

    def update(self, step: int, **rates: str) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step, **rates)
