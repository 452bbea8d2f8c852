"""The machine that this process runs on, as its operating system describes it. No TensorFlow here."""

import os

CPUINFO, MEMINFO = "/proc/cpuinfo", "/proc/meminfo"  # Linux's, see proc(5)


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Returns the bytes that may be taken without swapping; None if the system does not tell."""
    amounts = _values(MEMINFO, "MemAvailable")
    return int(amounts[0].split()[0]) * 1024 if amounts else None


def about_cores(*names: str) -> list[str]:
    """Reads the values of any of these names in /proc/cpuinfo, one a core; none if the system does not tell."""
    return _values(CPUINFO, *names)


def _values(path: str | os.PathLike, *names: str) -> list[str]:
    """Reads the values of lines `name: value`."""
    try:
        with open(path) as lines:
            pairs = [line.partition(":") for line in lines]
    except OSError:
        return []
    return [value.strip() for name, _, value in pairs if name.strip() in names]
