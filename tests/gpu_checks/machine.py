"""The machine: its GPUs, driver and libraries, whether TensorFlow has kernels for these GPUs, and how fast they are."""

import json
import os
import pathlib
import time

import numpy as np
import tensorflow as tf

from gpu_checks import trials
from gpu_checks.findings import COMPILED, MEASURED, add, attempt, check, unchecked
from tower_train import host
from tower_train.graph import devices

_PRODUCT_TOLERANCE = 1e-2  # of products whose factors may have 10 bits
_BATCH, _CPU_BATCH = 1024, 64  # examples a step of the benchmark
_SECS_A_SIDE, _CPU_SECS_A_SIDE = 12, 22  # about what a side takes to start and to be measured
_OTHER_SECS = 15  # and all else


def kernels(settings):
    here, build, driver = host.describe(), tf.sysconfig.get_build_info(), host.nvidia_driver()
    about = f"{here['processor']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB"
    add(MEASURED, f"{about}, NVIDIA driver: {driver}", **here["versions"])
    names = ("cuda_version", "cudnn_version", "cuda_compute_capabilities")
    add(MEASURED, "TensorFlow was built with", **{name: build[name] for name in names if name in build})
    gpus = trials.gpus()
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and (not hidden or hidden.startswith("-1")):
            unchecked("GPUs", f"CUDA_VISIBLE_DEVICES={hidden!r} hides them")
        elif driver:
            check(False, "TensorFlow sees a GPU beside an NVIDIA driver; its remarks say why not")
        unchecked("kernels, memory and speed of GPUs", "TensorFlow sees no GPU; towers on the CPU instead")
        return
    for gpu in gpus:
        with attempt(f"{gpu.name} computes"):
            _check_gpu(gpu)
    for number in ("first", "second"):  # which finds in CUDA's cache the kernels that the first one compiles
        with attempt(f"the {number} training"):
            start, words = time.monotonic(), trials.training_words(settings, number, max_steps=20)
            trials.command("tower_train", *words, settings=settings)
            add(MEASURED, f"the {number} training of 20 steps, start to end", seconds=time.monotonic() - start)


def _check_gpu(gpu):
    devices.let_memory_grow(trials.gpus())
    place, about = gpu.name.removeprefix("/physical_device:"), devices.gpu_of(gpu)
    built = COMPILED if devices.compile_notes([about]) else "kernels in binaries"
    add(MEASURED, f"{place}: {about.name}, {built}", capability=about.capability)
    a, b = np.random.default_rng(0).normal(size=[2, 256, 256]).astype(np.float32)
    images, filters = a.reshape([4, 32, 32, 16]), b[:144].reshape([3, 3, 16, 256])
    start = time.perf_counter()
    with tf.device(place):
        product, maps = tf.matmul(a, b).numpy(), tf.nn.conv2d(images, filters, 1, "SAME").numpy()
    seconds = time.perf_counter() - start
    with tf.device("/cpu:0"):
        expected = tf.nn.conv2d(images, filters, 1, "SAME").numpy()
    wrong = max(abs(product - a @ b).max() / abs(product).max(), abs(maps - expected).max() / abs(expected).max())
    check(wrong < _PRODUCT_TOLERANCE, f"{place} multiplies and convolves as the CPU does",
          relative_difference=float(wrong), first_time_secs=seconds)  # fmt: skip


def benchmark(settings):
    """This trainer, Keras and the port beside the ceiling of a card, on one card and on all: as many as time allows."""
    count = len(trials.gpus())
    if not count:
        unchecked("the benchmark on GPUs", "there is none; on the CPU instead")
    most = trials.power_of_two(count) or 2
    several = [f"tower_train/{most} towers/float32", "keras/MirroredStrategy 2"] if most > 1 else []
    wanted = ["ceiling/float32 matrix product", "tower_train/1 tower/float32", *several, "keras/fit",
              "ceiling/bfloat16 matrix product", "tower_train/1 tower/bfloat16", "port"]  # fmt: skip
    chosen = wanted[: max(2, int((settings.left() - _OTHER_SECS) / (_SECS_A_SIDE if count else _CPU_SECS_A_SIDE)))]
    out = pathlib.Path(settings.scratch, "benchmark")
    trials.command(
        "tower_train.benchmark", f"--systems={','.join(chosen)}", f"--towers={','.join(map(str, sorted({1, most})))}",
        "--rounds=2", "--seconds=1", f"--batch_size={_BATCH if count else _CPU_BATCH}", "--dataset=generated",
        f"--data_dir={settings.data_dir}", f"--out={out}", settings=settings,
    )  # fmt: skip
    rows = json.loads((out / "benchmark.json").read_text())["parts"]["Training"]
    for row in rows:
        about = {"share": (row["share"] or {}).get("median"), "megabytes_of_a_gpu": (row["card_bytes"] or 0) / 2**20}
        about |= {"examples_per_sec": row["rate"]["median"], "first_step_secs": row["first_step_secs"]}
        add(MEASURED, row["side"]["name"], **{name: value for name, value in about.items() if value})
    check(len(rows) == len(chosen), f"the benchmark measured {len(chosen)} of its {len(wanted)} sides")
