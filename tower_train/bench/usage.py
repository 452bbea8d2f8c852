"""What processes use: memory and processor time. No TensorFlow here."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Sequence

_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


def resident_bytes(name: str, others: Sequence[int] = ()) -> int:
    """Resident memory of this process and others together, now (VmRSS) or at most (VmHWM).

    Without Linux's /proc it is the peak in both cases, of this process alone. Not ru_maxrss where it can be helped: on
    Linux that begins at the peak of the process that started this one.

    Args:
      name: of a line of /proc/PID/status.
      others: process numbers; those that are no more count nothing.
    """
    try:
        own = _status_bytes(os.getpid(), name)
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for other in others:
        with contextlib.suppress(OSError, StopIteration):
            own += _status_bytes(other, name)
    return own


def processor_secs(others: Sequence[int] = ()) -> float:
    """Processor time of this process and others together since they began; the others' on Linux only."""
    secs = time.process_time()
    for other in others:
        with contextlib.suppress(OSError), open(f"/proc/{other}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]  # what is before may hold spaces
            secs += (int(user) + int(system)) / _TICKS_PER_SEC
    return secs


def _status_bytes(process: int, name: str) -> int:
    with open(f"/proc/{process}/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
