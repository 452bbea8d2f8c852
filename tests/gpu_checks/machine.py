"""The machine: its GPUs, its driver, its libraries, and whether TensorFlow has kernels for these GPUs."""

import os
import pathlib
import shutil
import subprocess
import time

import numpy as np
import tensorflow as tf

from gpu_checks.findings import COMPILED
from tower_train import host
from tower_train.graph import devices

_SMI_COLUMNS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
_PRODUCT_TOLERANCE = 1e-2  # of products whose factors may have 10 bits


def check(findings, settings):
    here = host.describe()
    findings.measured(
        f"{here['processor']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB", **here["versions"]
    )
    build = tf.sysconfig.get_build_info()
    names = ("cuda_version", "cudnn_version", "cuda_compute_capabilities")
    findings.measured("TensorFlow was built with", **{name: build[name] for name in names if name in build})
    if driver := host.nvidia_driver():
        version = pathlib.Path(driver).read_text().splitlines()[0] if driver == host.NVIDIA_DRIVER else "unknown"
        findings.measured("NVIDIA driver", found_by=driver, version=version)
    for line in nvidia_smi(_SMI_COLUMNS) or []:
        findings.measured("nvidia-smi", **dict(zip(_SMI_COLUMNS, line, strict=False)))
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and (not hidden or hidden.startswith("-1")):
            findings.unchecked("GPUs", f"CUDA_VISIBLE_DEVICES={hidden!r} hides them")
        elif driver:
            findings.check(False, "TensorFlow sees a GPU beside an NVIDIA driver; its remarks say why not")
        findings.unchecked("kernels, memory and speed of GPUs", "TensorFlow sees no GPU; towers on the CPU instead")
        return
    for gpu in gpus:
        with findings.attempt(f"{gpu.name} computes"):
            _check_gpu(findings, gpu)
    _time_starts(findings, settings)


def _time_starts(findings, settings):
    """A first training compiles kernels that the wheel has no binaries of, a second finds them in CUDA's cache."""
    from gpu_checks import trials  # which asks this module

    for number in ("first", "second"):
        with findings.attempt(f"the {number} training"):
            start, words = time.monotonic(), trials.training_words(settings, number, max_steps=20)
            trials.command("tower_train", *words, seconds=settings.left())
            findings.measured(f"the {number} training of 20 steps, start to end", seconds=time.monotonic() - start)


def nvidia_smi(columns) -> list[list[str]] | None:
    """Asks nvidia-smi about each GPU that this process may use: rows; None without an answer, as for parts of a card
    (MIG), of which nvidia-smi tells what the whole card has."""
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/nvidia/bin")
    if not program:
        return None
    asked = ",".join(("uuid", "mig.mode.current", *columns))
    words = [program, f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    lines = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    found, seen = [], os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(line[0] for line in lines))
    for name in filter(None, map(str.strip, seen.split(","))):
        by_name = name.startswith("GPU-")
        rows = [line for i, line in enumerate(lines) if (line[0].startswith(name) if by_name else name == str(i))]
        if name.startswith("MIG") or len(rows) == 1 and rows[0][1] == "Enabled":
            return None
        if len(rows) != 1:  # CUDA ignores this one and all after it
            break
        found.append(rows[0][2:])
    return found


def megabytes(column: str) -> list[int] | None:
    """Each GPU's memory.total or memory.used; None if unknown, also of one that answers [N/A]."""
    rows = nvidia_smi((column,))
    return [int(cell) for cell, *_ in rows] if rows and all(cell.isdigit() for cell, *_ in rows) else None


def _check_gpu(findings, gpu):
    devices.let_memory_grow(tf.config.list_physical_devices("GPU"))
    details = tf.config.experimental.get_device_details(gpu)
    capability = details.get("compute_capability")
    place = gpu.name.removeprefix("/physical_device:")
    findings.measured(
        f"{place}: {details.get('device_name')}", compute_capability=str(capability),
        kernels=COMPILED if devices.compile_notes([devices.gpu_of(gpu)]) else "binaries",
    )  # fmt: skip
    a, b = np.random.default_rng(0).normal(size=[2, 256, 256]).astype(np.float32)
    images, kernels = a.reshape([4, 32, 32, 16]), b[:144].reshape([3, 3, 16, 256])
    start = time.perf_counter()
    with tf.device(place):
        product, maps = tf.matmul(a, b).numpy(), tf.nn.conv2d(images, kernels, 1, "SAME").numpy()
    seconds = time.perf_counter() - start
    with tf.device("/cpu:0"):
        expected = tf.nn.conv2d(images, kernels, 1, "SAME").numpy()
    wrong = max(abs(product - a @ b).max() / abs(product).max(), abs(maps - expected).max() / abs(expected).max())
    findings.check(wrong < _PRODUCT_TOLERANCE, f"{place} multiplies and convolves as the CPU does",
                   relative_difference=float(wrong), first_time_secs=seconds)  # fmt: skip
