"""Things that tests of several packages share. Every test runs on the CPU, also where there are GPUs."""

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

if "GPU_CHECK" not in os.environ:  # of scripts/gpu_check
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import forked  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image  # noqa: E402

from tower_train.options import command_line  # noqa: E402

YOUNG_OBJECTS = 400_000  # a graph has as many; to look at them for each 700 new ones took a sixth of the time


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="draw hundreds of random configurations, not eight")


def pytest_configure(config):
    """Imports TensorFlow, but not into the process that only starts those of pytest-xdist and would let them wait."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        # With oneDNN TensorFlow looks through all kernels for each operation of a graph: a fifth of the time. Forked
        # processes have it, as users' have.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        import tensorflow  # noqa: F401
    else:
        forked.share_server()


def pytest_collection_modifyitems(items):
    """Puts tests that mostly wait for processes first: while one worker waits, the others keep the cores busy."""
    items.sort(key=lambda item: item.path.parent.name not in ("cluster", "gpus"))


def pytest_collection_finish():
    """Keeps the garbage collector from what stays until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@pytest.fixture(scope="session")
def cifar10_dir(tmp_path_factory):
    """A directory with all of CIFAR-10's files, of 40 records each: labels 0 to 9 and pixels at random. Only for
    reading: copy it to damage it."""
    import jobs

    def write(directory):
        for seed, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
            rng = np.random.default_rng(seed)
            records = rng.integers(0, 256, [40, 1 + 32 * 32 * 3], np.uint8)
            records[:, 0] = rng.integers(0, 10, 40)
            records.tofile(directory / name)

    return jobs.once(tmp_path_factory, "cifar10", write)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Images of 32 x 32 in two classes of colour: 10 of each to train on, 3 to test on. Only for reading."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 3)):
        for channel, class_name in ((0, "rød"), (2, "blåu")):
            (root / split / class_name).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 100, [32, 32, 3], np.uint8)
                image[..., channel] += 150
                Image.fromarray(image).save(root / split / class_name / f"{i}.png")
    return root


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command in this process: (its module, words) -> (exit status, stdout, stderr)."""

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [module.__name__, *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            command_line.run(module.main)
        return left.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def refusal(command):
    """Runs a command that is to be refused: (its module, words) -> the line that says why."""

    def run(module, *words):
        status, stdout, stderr = command(module, *words)
        assert (status, stdout) == (2, "") and stderr.startswith("tower_train: error: ") and stderr.count("\n") == 1
        return stderr

    return run


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """The directory of a run of the toy workload, 40 steps on two towers, with summaries."""
    import jobs

    directory = tmp_path_factory.mktemp("toy") / "run"
    jobs.train_toy(directory, max_steps=40, summary_every_steps=10)
    return directory


@pytest.fixture
def run(toy_run, tmp_path):
    """A copy of that run."""
    return pathlib.Path(shutil.copytree(toy_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def cifar10_command(cifar10_dir):
    """The command line of a small run of the reference workload, but for --train_dir."""
    import jobs

    options = dict(num_gpus=2, batch_size=5, max_steps=24, seed=7, learning_rate=0.01, ema=0.9)
    every = dict(log_every_steps=4, summary_every_steps=6, save_every_steps=12, eval_every_steps=12)
    return jobs.flags(data_dir=cifar10_dir, **options, **every)


@pytest.fixture(scope="session")
def cifar10_run(cifar10_command, tmp_path_factory):
    """(directory, finished process) of that command, run once."""
    import jobs

    def run(folder):
        process = jobs.command("tower_train", *cifar10_command, f"--train_dir={folder / 'train dir'}")
        assert process.returncode == 0, process.stderr
        (folder / "output.json").write_text(json.dumps(vars(process)))

    folder = jobs.once(tmp_path_factory, "cifar10 run", run)
    return folder / "train dir", subprocess.CompletedProcess(**json.loads((folder / "output.json").read_text()))
