"""Short trainings, and the devices that they are done on."""

import os
import shutil
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

from gpu_checks import findings

_SHARE_FOR_PARTS = 0.7
_LEAST_MEGABYTES = 4500  # of a card that does not tell, as of the smallest part of an A100
_SECS_TO_TELL = 5  # before a section's own end


def gpus() -> list[tf.config.PhysicalDevice]:
    """The physical GPUs; asking does not use them."""
    return tf.config.list_physical_devices("GPU")


def megabytes(column: str) -> list[int] | None:
    """Each GPU's memory.total or memory.used by nvidia-smi. None where it does not tell them of just the GPUs that this
    process has: hidden ones, parts of cards (MIG), of which it tells the whole card's, and [N/A]."""
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/nvidia/bin")
    if not program or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    words = [program, f"--query-gpu=mig.mode.current,{column}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    tells = not done.returncode and len(rows) == len(gpus())
    tells = tells and all(mode != "Enabled" and number.isdigit() for mode, number in rows)
    return [int(number) for _, number in rows] if tells else None


def places(parts_megabytes: int) -> tuple[int, str]:
    """Sets up devices for at least two towers, a power of two; returns their number, and what they are, for people.

    On one GPU they are its parts, which must be made before anything uses it.
    """
    count = len(gpus())
    if count == 1:
        split_first_gpu(2, parts_megabytes)
        return 2, "2 parts of one GPU"
    towers = max(2, power_of_two(min(count, 8)))
    return towers, f"{towers} {'GPUs' if count else 'logical CPU devices'}"


def power_of_two(count: int) -> int:
    """The greatest one that is no more than count; 0 of 0."""
    return 1 << count.bit_length() - 1 if count else 0


def split_first_gpu(parts: int, most_megabytes: int) -> None:
    """Lets the first GPU carry several towers, each with so much memory or what is there, and hides the others."""
    [total, *_] = megabytes("memory.total") or [_LEAST_MEGABYTES]
    limit = min(most_megabytes, int(_SHARE_FOR_PARTS * total / parts))  # libraries need some too
    tf.config.set_visible_devices(gpus()[:1], "GPU")
    tf.config.set_logical_device_configuration(gpus()[0], [tf.config.LogicalDeviceConfiguration(limit)] * parts)


def compare(what: str, values: dict, expected: dict, tolerance: float = 1e-9) -> None:
    """Writes whether two trainings have ended with the same variables: each but for a share of its greatest number."""
    if values.keys() != expected.keys():
        raise ValueError(f"variables {sorted(values)} beside {sorted(expected)}")
    difference = max(float(np.max(np.abs(values[name] - value)) / max(np.max(np.abs(value)), 1e-300))
                     for name, value in expected.items())  # fmt: skip
    findings.check(difference <= tolerance, what, greatest_relative_difference=difference)


def command(module: str, *words, settings) -> str:
    """Runs `python -m module words` until the section's end at most; prints and returns its output."""
    started, seconds = time.monotonic(), max(5.0, settings.left() - _SECS_TO_TELL)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=seconds, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"), flush=True)
        raise TimeoutError(f"python -m {module} took more than {seconds:.0f} s") from None
    print(f"--- python -m {module} {' '.join(map(str, words))}: status {done.returncode}, "
          f"{time.monotonic() - started:.1f} s\n{done.stdout}", flush=True)  # fmt: skip
    if done.returncode:
        told = [line for line in done.stdout.splitlines() if "rror" in line] or done.stdout.splitlines()
        raise RuntimeError(f"python -m {module} left with status {done.returncode}: {' | '.join(told[-2:])[-400:]}")
    return done.stdout


def training_words(settings, name: str, **options) -> list[str]:
    fixed = dict(dataset="generated", data_dir=settings.data_dir, train_dir=f"{settings.scratch}/{name}",
                 summary_every_steps=0, save_every_steps=0, check_data=False)  # fmt: skip
    return [f"--{name}={value}" for name, value in (fixed | options).items()]
