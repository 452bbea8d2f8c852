"""Short trainings, and the devices that they are done on."""

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
import toy_workload
import trainings

import cifar10
from gpu_checks import machine
from tower_train.config import Config
from tower_train.workload import DataRequest

TOLERANCE = 1e-9  # of float64, as everywhere
_SHARE_FOR_PARTS = 0.7
_LEAST_MEGABYTES = 4500  # of a card that does not tell, as of the smallest part of an A100
_SECS_TO_TELL = 5  # before a section's own end


def gpus() -> list[tf.config.PhysicalDevice]:
    """The physical GPUs; asking does not use them."""
    return tf.config.list_physical_devices("GPU")


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


def split_first_gpu(parts: int, megabytes: int) -> None:
    """Lets the first GPU carry several towers, each with so much memory or what is there, and hides the others."""
    [total, *_] = machine.megabytes("memory.total") or [_LEAST_MEGABYTES]
    megabytes = min(megabytes, int(_SHARE_FOR_PARTS * total / parts))  # libraries need some too
    tf.config.set_visible_devices(gpus()[:1], "GPU")
    tf.config.set_logical_device_configuration(
        gpus()[0], [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)] * parts
    )


def workload_and_examples(model: str, data_dir: str):
    """(Workload, Examples) of the toy or of a network of cifar10, on drawn images."""
    if model == "toy":
        return toy_workload.WORKLOAD, toy_workload.load(DataRequest("train", "toy"))
    workload = cifar10.WORKLOAD.with_options({"model": model})
    return workload, workload.examples(DataRequest("train", "generated", data_dir))


def choices(option: str) -> tuple[str, ...]:
    return next(field.metadata["allowed"] for field in dataclasses.fields(Config) if field.name == option)


def variables_after(steps: int, model: str, data_dir: str, **options) -> dict[str, np.ndarray]:
    workload, examples = workload_and_examples(model, data_dir)
    return trainings.train(workload, examples, steps, **({"device": "auto"} | options))[1]


def greatest_difference(values: dict, expected: dict) -> float:
    """The greatest difference of any variable, relative to the greatest number in it."""
    if values.keys() != expected.keys():
        raise ValueError(f"variables {sorted(values)} beside {sorted(expected)}")
    return max(float(np.max(np.abs(values[name] - expected[name])) / max(np.max(np.abs(expected[name])), 1e-300))
               for name in expected)  # fmt: skip


def compare(findings, what: str, values: dict, expected: dict, tolerance: float = TOLERANCE) -> None:
    """Writes whether two trainings have ended with the same variables."""
    difference = greatest_difference(values, expected)
    findings.check(difference <= tolerance, what, greatest_relative_difference=difference)


def command(module: str, *words, seconds: float) -> subprocess.CompletedProcess:
    """Runs `python -m module words` for so long at most; its output is kept and printed."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=max(5.0, seconds - _SECS_TO_TELL), env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"), flush=True)
        raise TimeoutError(f"python -m {module} took more than {seconds:.0f} s") from None
    print(f"--- python -m {module} {' '.join(map(str, words))}: status {done.returncode}, "
          f"{time.monotonic() - started:.1f} s\n{done.stdout}", flush=True)  # fmt: skip
    if done.returncode:
        told = [line for line in done.stdout.splitlines() if "rror" in line] or done.stdout.splitlines()
        raise RuntimeError(f"python -m {module} left with status {done.returncode}: {' | '.join(told[-2:])[-400:]}")
    return done


def training_words(settings, name: str, **options) -> list[str]:
    fixed = dict(dataset="generated", data_dir=settings.data_dir, train_dir=f"{settings.scratch}/{name}",
                 summary_every_steps=0, save_every_steps=0, check_data=False)  # fmt: skip
    return [f"--{name}={value}" for name, value in (fixed | options).items()]
