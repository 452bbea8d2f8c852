"""Runs that several tests of this room read, and never change: copy one to go on with it."""

import pytest
import runs


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """The directory of a run of the toy workload, 40 steps on two towers."""
    directory = tmp_path_factory.mktemp("toy") / "run"
    runs.train_toy(directory, max_steps=40)
    return directory


@pytest.fixture(scope="session")
def cifar10_command(cifar10_dir):
    """The command line of a small run of the reference workload, but for --train_dir."""
    return runs.flags(
        num_gpus=2, batch_size=8, max_steps=24, seed=7, data_dir=cifar10_dir, learning_rate=0.01,
        moving_average_decay=0.9, log_every_steps=4, summary_every_steps=6, save_every_steps=12, eval_every_steps=12,
    )  # fmt: skip


@pytest.fixture(scope="session")
def cifar10_run(cifar10_command, tmp_path_factory):
    """(directory, finished process) of that command, run once."""
    directory = tmp_path_factory.mktemp("cifar10 run") / "train dir"
    process = runs.command("tower_train", *cifar10_command, f"--train_dir={directory}")
    assert process.returncode == 0, process.stderr
    return directory, process
