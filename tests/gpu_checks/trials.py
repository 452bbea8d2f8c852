"""Short trainings, and the devices that they are done on."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

_SHARE_FOR_PARTS = 0.7
_LEAST_MEGABYTES = 4500  # of a card that does not tell, as of the smallest part of an A100


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


def places(parts_megabytes: int) -> int:
    """Sets up devices for several towers, and returns how many: all GPUs up to eight, a power of two; the two parts of
    the only one, which must be made before anything uses it; logical CPU devices."""
    if len(gpus()) == 1:
        [total] = megabytes("memory.total") or [_LEAST_MEGABYTES]
        limit = min(parts_megabytes, int(_SHARE_FOR_PARTS * total / 2))  # libraries need some too
        tf.config.set_logical_device_configuration(gpus()[0], [tf.config.LogicalDeviceConfiguration(limit)] * 2)
    return max(2, 1 << min(len(gpus()), 8).bit_length() - 1) if gpus() else 2


def need(count: int) -> None:
    if len(gpus()) < count:
        pytest.skip(f"GPUs that it needs: {count}; there are {len(gpus())}")


def assert_same(values: dict, expected: dict, tolerance: float = 1e-9) -> None:
    """Two trainings have ended with the same variables: each but for a share of its greatest number."""
    assert values.keys() == expected.keys()
    difference = max(
        float(np.max(np.abs(values[name] - value)) / max(np.max(np.abs(value)), 1e-300))
        for name, value in expected.items()
    )
    print(f"\nmeasured: greatest relative difference {difference:.3g}")
    assert difference <= tolerance


def command(module: str, *words) -> str:
    """Runs `python -m module words`; prints and returns its output."""
    words = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"--- {' '.join(words)}: status {done.returncode}\n{done.stdout}", flush=True)
    assert done.returncode == 0, done.stdout[-400:]
    return done.stdout


def training_words(train_dir, **options) -> list[str]:
    fixed = dict(
        dataset="generated",
        data_dir=train_dir.parent / "data",
        train_dir=train_dir,
        summary_every_steps=0,
        save_every_steps=0,
        check_data=False,
    )
    return [f"--{name}={value}" for name, value in (fixed | options).items()]
