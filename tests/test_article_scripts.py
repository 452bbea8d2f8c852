"""The scripts of the articles run to their end without GPUs, and say what they measured."""

import functools
import re
import runpy
import subprocess
import sys

import idx_files
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tower_train
from tower_train import estimator

# Answers for each script, of one process.
ANSWERED = """
import contextlib, io, runpy, sys
for name in ("keras_multi_gpu", "estimator_fashion_mnist", "estimator_retinal_oct"):
    for word, status, said in (("--help", 0, "options:"), ("--no_such_option", 2, "unrecognized arguments: --no_")):
        sys.argv, texts = [f"{name}.py", word], io.StringIO()
        try:
            with contextlib.redirect_stdout(texts), contextlib.redirect_stderr(texts):
                runpy.run_path(f"{sys.path[-1]}/scripts/{name}.py", run_name="__main__")
        except SystemExit as end:
            assert end.code == status, name
        assert texts.getvalue().startswith("usage: ") and said in texts.getvalue(), (name, word, texts.getvalue())
"""


def test_help_and_mistakes_are_answered_without_a_line_of_tensorflows():
    words = [sys.executable, "-c", f"import sys; sys.path.append({str(jobs.ROOT)!r})" + ANSWERED]
    done = subprocess.run(words, capture_output=True, env=jobs.environment(), text=True, timeout=jobs.WAIT_SECS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def small_network(keras, weights=None, input_shape=None, classes=None, include_top=True):
    """In place of one of keras.applications, of which a tower takes seconds to build."""
    features = inputs = keras.Input(shape=input_shape)
    for strides in (2, 1, 1, 1, 1):
        features = keras.layers.Conv2D(4, 3, strides)(features)
    if include_top:
        features = keras.layers.Dense(classes, "softmax")(keras.layers.Flatten()(features))
    return keras.Model(inputs, features)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small networks, whose towers are not compared: tests/fronts compares them."""
    monkeypatch.setattr(tf.compat.v1.logging, "set_verbosity", lambda _: None)
    plain = functools.partial(tower_train.multi_gpu_model, check_towers="never")
    monkeypatch.setattr(tower_train, "multi_gpu_model", plain)
    monkeypatch.setattr(estimator.RunConfig, "check_towers", "never")
    for module, network in ((keras, "VGG19"), (tf_keras, "VGG16")):
        monkeypatch.setattr(module.applications, network, functools.partial(small_network, module))


def run_script(name, monkeypatch, *words, run_name="script"):
    """Runs a script here; returns its names."""
    monkeypatch.setattr(sys, "argv", ["script", *words])
    return runpy.run_path(jobs.ROOT / "scripts" / f"{name}.py", run_name=run_name)


def test_what_cannot_be_trained_with_is_one_line(monkeypatch, capfd):
    for name, words, said in (
        ("keras_multi_gpu", "--size=8", "--size=8: .*at least 71"),
        ("estimator_fashion_mnist", "--data_dir=/missing", "/missing/train-images-idx3-ubyte.gz"),
        ("estimator_retinal_oct", "--data_dir=/missing", "/missing/train"),
    ):
        with pytest.raises(SystemExit) as left:
            run_script(name, monkeypatch, words, run_name="__main__")
        stderr = capfd.readouterr().err
        assert left.value.code == 2 and "Traceback" not in stderr
        assert re.search(said, stderr.splitlines()[-1]), stderr


def test_keras_on_several_towers_saves_the_plain_model(tmp_path, monkeypatch, capsys):
    saved = tmp_path / "vgg.keras"
    words = ["--model=VGG19", "--size=32", "--samples=8", f"--save={saved}"]
    assert run_script("keras_multi_gpu", monkeypatch, *words)["main"]([]) == 0
    shown = capsys.readouterr()
    assert "2 towers on the CPU" in shown.err and f"Saved {saved}" in shown.out
    assert keras.models.load_model(saved).input_shape == (None, 32, 32, 3)


def timed(shown):
    """The number of steps that a script says, after a check that it does not speak of GPUs."""
    total, rate, evaluated = shown.splitlines()[-3:]
    assert re.fullmatch(r"total time with 2 CPU towers: \d+\.\d s", total)
    assert re.fullmatch(r"\d+ images/second with 2 CPU towers", rate)
    assert "'accuracy': " in evaluated and "GPUs" not in shown
    return int(re.search(r"'global_step': (?:np\.int64\()?(\d+)", evaluated)[1])


def test_fashion_mnist_as_an_estimator(tmp_path, monkeypatch, capsys):
    idx_files.write(tmp_path)
    script = run_script("estimator_fashion_mnist", monkeypatch, "--batch_size=8", f"--data_dir={tmp_path}")
    assert script["main"]([]) == 0
    assert timed(capsys.readouterr().out) == 3  # 48 images, 2 towers of 8
    images, labels = script["load"]("t10k", 12)
    assert images.dtype == np.float32 and images.min() == 0 and images.max() == 1
    script["options"].data_dir = None
    assert [each.shape for each in script["load"]("train", 6)] == [(6, *images.shape[1:]), (6, *labels.shape[1:])]


def test_retinal_images_from_folders_have_pixels_from_0_to_1(tmp_path, monkeypatch, capsys):
    pixels = {"CNV": 0, "DME": 80, "DRUSEN": 160, "NORMAL": 255}
    for split in ("train", "test"):
        for label, value in pixels.items():
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for i in range(8):
                image = np.full([40, 50, 1], value, np.uint8)
                (folder / f"{label}-{i}.jpeg").write_bytes(tf.io.encode_jpeg(image).numpy())
    words = [f"--data_dir={tmp_path}", "--size=32", "--batch_size=8"]
    script = run_script("estimator_retinal_oct", monkeypatch, *words)
    assert script["main"]([]) == 0
    assert timed(capsys.readouterr().out) == 2  # 32 images, 2 towers of 8
    images, labels = next(iter(script["input_fn"](f"{tmp_path}/test/*/*.jpeg", script["LABELS"], num_epochs=1)))
    np.testing.assert_allclose(images[:, 16, 16, 0], np.array(list(pixels.values()))[labels.numpy().argmax(1)] / 255)
