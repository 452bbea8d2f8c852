"""Runs to evaluate."""

import jobs
import pytest

import tower_train
from tower_train import Config


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """A run so hasty that its weights and their moving averages classify differently. Only the evaluations of it in
    result.json and its event files may change."""
    directory = tmp_path_factory.mktemp("hasty") / "run"
    jobs.train_toy(directory, num_gpus=1, batch_size=16, max_steps=12, ema=0.99, learning_rate=0.05, eval_every_steps=6)
    return directory


@pytest.fixture(scope="package")
def image_run(data, tmp_path_factory):
    """A run of the image-folder workload."""
    directory = tmp_path_factory.mktemp("images") / "run"
    options = dict(num_gpus=1, batch_size=16, max_steps=8, optimizer="adam", learning_rate=0.0003, ema=0.5)
    options |= dict(eval_every_steps=4, eval_at_end=True, summary_every_steps=0, check_towers="never")
    config = Config(train_dir=str(directory), data_dir=str(data), **options)
    tower_train.train("tower_train.workloads.image_folder", config, workload_options=dict(image_size=32, flip=False))
    return directory
