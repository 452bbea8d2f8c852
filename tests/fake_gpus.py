"""GPUs that hold memory but cannot compute: builds tests/gpus/fake_gpu.cc, a plugin of TensorFlow."""

import pathlib
import shutil
import subprocess

import tensorflow as tf

COMPILER = shutil.which("g++")
WITHOUT = (
    "no g++, which only this test needs: it builds GPUs that cannot compute (Debian, Ubuntu: apt-get install g++). "
    "tests/gpus/test_fake_gpus.py looks kernels up in TensorFlow's registry all the same"
)


def build(folder):
    """Builds the plugin into a folder; returns its path, or None without g++."""
    if not COMPILER:
        return None
    plugin = pathlib.Path(folder, "fake_gpu.so")
    source = pathlib.Path(__file__).with_name("gpus") / "fake_gpu.cc"
    options = ["-std=c++17", "-shared", "-fPIC", "-O1", f"-I{tf.sysconfig.get_include()}"]
    subprocess.run([COMPILER, *options, source, "-o", plugin], check=True)
    return plugin
