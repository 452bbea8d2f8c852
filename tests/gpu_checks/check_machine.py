"""The machine: its GPUs, driver and libraries, whether TensorFlow has kernels for these GPUs, and what starts take."""

import os
import time

import numpy as np
import pytest
import tensorflow as tf

from gpu_checks import trials
from tower_train import host
from tower_train.graph import devices

PRODUCT_TOLERANCE = 1e-2  # of products whose factors may have 10 bits


def test_tensorflow_sees_the_gpus_of_a_machine_with_a_driver():
    here, build, driver = host.describe(), tf.sysconfig.get_build_info(), host.nvidia_driver()
    about = {"driver": driver} | {name: build.get(name) for name in ("cuda_version", "cuda_compute_capabilities")}
    for name, value in (here | about).items():
        print(f"measured: {name}: {value}")
    if not driver or (os.environ.get("CUDA_VISIBLE_DEVICES") or "-1").startswith("-1") and not trials.gpus():
        pytest.skip("there is no NVIDIA driver, or CUDA_VISIBLE_DEVICES hides all GPUs")
    assert trials.gpus(), "see TensorFlow's remarks"


@pytest.mark.parametrize("number", range(len(trials.gpus()) or 1))
def test_a_gpu_multiplies_and_convolves_as_the_cpu_does(number):
    trials.need(1)
    devices.let_memory_grow(trials.gpus())
    about = devices.as_gpu(trials.gpus()[number])
    print("measured:", about, *(devices.notes_on_new_models([about]) or ["TensorFlow has binaries for it"]))
    a, b = np.random.default_rng(0).normal(size=[2, 256, 256]).astype(np.float32)
    images, filters = a.reshape([4, 32, 32, 16]), b[:144].reshape([3, 3, 16, 256])
    with tf.device(f"/gpu:{number}"):
        product, maps = tf.matmul(a, b).numpy(), tf.nn.conv2d(images, filters, 1, "SAME").numpy()
    with tf.device("/cpu:0"):
        expected = tf.nn.conv2d(images, filters, 1, "SAME").numpy()
    np.testing.assert_allclose(product, a @ b, rtol=0, atol=PRODUCT_TOLERANCE * abs(product).max())
    np.testing.assert_allclose(maps, expected, rtol=0, atol=PRODUCT_TOLERANCE * abs(expected).max())


@pytest.mark.parametrize("number", ["first", "second, which finds kernels in CUDA's cache"])
def test_a_training_from_start_to_end(number, tmp_path):
    start = time.monotonic()
    trials.command("tower_train", *trials.training_words(tmp_path / "run", max_steps=20))
    print(f"measured: the {number} training of 20 steps took {time.monotonic() - start:.1f} s")
