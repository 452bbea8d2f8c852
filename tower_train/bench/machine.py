"""What a benchmark ran on, for its table and its benchmark.json. No TensorFlow here."""

import importlib.metadata
import os
import platform
import re

from tower_train import host
from tower_train.host import cores

_PACKAGES = ("tower_train", "tensorflow", "keras", "numpy", "torch")  # those of them that are installed


def describe() -> dict:
    """Processor, usable cores, memory, operating system and versions."""
    return {
        "processor": next(iter(host.about_cores("model name")), platform.processor() or platform.machine()),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "load_at_start": os.getloadavg(),
        "versions": {"python": platform.python_version()} | _versions(*_PACKAGES),
    }


def busy_core_secs() -> float | None:
    """Seconds that this machine's cores have been in use, by anyone; None where that is not known for just these cores.

    From Linux's /proc/stat, see proc(5): user, nice, system, idle, iowait, irq, softirq and steal, in clock ticks.
    """
    try:
        with open("/proc/stat") as lines:
            by_core = [line.split()[1:9] for line in lines if re.match(r"cpu\d", line)]
    except OSError:
        return None
    if len(by_core) != cores():
        return None
    ticks = sum(int(value) for core in by_core for i, value in enumerate(core) if i not in (3, 4))
    return ticks / os.sysconf("SC_CLK_TCK")


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return found
