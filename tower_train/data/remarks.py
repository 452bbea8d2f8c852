"""Remarks of image decoding libraries, which they write to standard error without a file's name."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tower_train import console

# Our own log lines and TensorFlow's, except those of its decoders.
_LOG_LINE = re.compile(
    rb"tower_train: |(\d{4}-\d\d-\d\d |[IWEF]\d{4} |WARNING)(?!.*(jpeg|png|gif|webp|bmp|image)\w*\.cc)"
)
_LOG_HEAD = re.compile(r"^[^\]]*\.cc:\d+\] ")


@contextlib.contextmanager
def of_decoders() -> Iterator[Callable[[], str]]:
    """Keeps what C libraries write to standard error; yields a function that returns its first line since the last
    call, or an empty string. Log lines of others are passed on at the end."""
    passed_on = []
    try:
        with console.stderr_in_file() as file:

            def take() -> str:
                lines = _emptied(file).splitlines()
                passed_on.extend(line for line in lines if _LOG_LINE.match(line))
                remarks = (line.decode(errors="replace") for line in lines if not _LOG_LINE.match(line))
                return _LOG_HEAD.sub("", next(remarks, ""))

            try:
                yield take
            finally:
                take()
    finally:
        for line in passed_on:
            os.write(2, line + b"\n")


def _emptied(file: BinaryIO) -> bytes:
    """Returns and removes the contents of a file."""
    file.seek(0)
    contents = file.read()
    file.seek(0)
    file.truncate()
    return contents
