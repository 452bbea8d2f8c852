"""A run to evaluate."""

import jobs
import pytest


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """A run so hasty that its weights and their moving averages classify differently. Only the evaluations of it in
    result.json and its event files may change."""
    directory = tmp_path_factory.mktemp("hasty") / "run"
    jobs.train_toy(directory, max_steps=12, ema=0.99, learning_rate=0.05, eval_every_steps=6)
    return directory
