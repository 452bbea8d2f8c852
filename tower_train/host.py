"""The machine of this process, as its operating system describes it. No TensorFlow here."""

import contextlib
import os
import platform
import random
import shutil
import socket
import subprocess

CPUINFO, MEMINFO = "/proc/cpuinfo", "/proc/meminfo"  # Linux's, see proc(5)
NVIDIA_DRIVER = "/proc/driver/nvidia/version"  # there while the driver is loaded, but not under WSL 2
_PACKAGES = ("tower_train", "tensorflow", "keras", "numpy", "torch")  # if installed
_PORTS = range(20_000, 32_000)  # below those that Linux gives to connections
# For bfloat16, as Linux calls them: of Intel, of x86 with AVX-512, and of ARM. The first that is there counts.
_BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory() -> int | None:
    """Returns the bytes that may be allocated without swapping; None if unknown."""
    return _bytes(MEMINFO, "MemAvailable")


def total_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nvidia_driver() -> str | None:
    """Returns what shows that this machine has an NVIDIA driver; None without one."""
    if os.path.exists(NVIDIA_DRIVER):
        return NVIDIA_DRIVER
    if program := shutil.which("nvidia-smi"):  # of WSL 2, or of a container that hides the file
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, "-L"], capture_output=True, timeout=20)
            return program if done.stdout.startswith(b"GPU") else None
    return None


def free_addresses(count: int) -> list[str]:
    """Returns free addresses localhost:PORT, chosen at random so that simultaneous callers get different ones."""
    free: set[str] = set()
    while len(free) < count:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("localhost", port))
            free.add(f"localhost:{port}")
    return list(free)


def bfloat16_instructions() -> str | None:
    """Returns the name of the instructions by which every core multiplies bfloat16 faster than float32.

    "" if there are none, None if the system does not tell.
    """
    cores = [set(flags.split()) for flags in _values(CPUINFO, "flags", "Features")]  # of x86 and of ARM
    if not cores:
        return None
    instructions = next((name for name in _BFLOAT16_INSTRUCTIONS if all(name in core for core in cores)), "")
    # Of Intel's Xeons one port has avx512_bf16 where two have float32: half of float32's rate, as measured on one.
    return "" if instructions == "avx512_bf16" and "GenuineIntel" in _values(CPUINFO, "vendor_id") else instructions


def _values(path: str | os.PathLike, *names: str) -> list[str]:
    """Returns the values of lines `name: value`."""
    try:
        with open(path) as lines:
            pairs = [line.partition(":") for line in lines]
    except OSError:
        return []
    return [value.strip() for name, _, value in pairs if name.strip() in names]


def _bytes(path: str | os.PathLike, name: str) -> int | None:
    """Returns an amount from a line `name: value kB`."""
    return next((int(value.split()[0]) * 1024 for value in _values(path, name)), None)


def describe() -> dict:
    """Returns processor, usable cores, memory, operating system and versions."""
    from importlib import metadata  # as in errors.py

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):  # tower_train may run from a checkout
            versions[package] = metadata.version(package)
    return {
        "processor": next(iter(_values(CPUINFO, "model name")), platform.processor() or platform.machine()),
        "cores": cores(),
        "memory_bytes": total_memory(),
        "platform": platform.platform(),
        "load_at_start": os.getloadavg(),
        "versions": versions,
    }


def peak_bytes() -> int:
    """Returns the peak of this process's resident memory."""
    return _bytes("/proc/self/status", "VmHWM") or 0  # ru_maxrss would begin at the peak of the parent process
