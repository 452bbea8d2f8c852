"""Workers and towers, however they are mixed, train what one tower trains: in float64 to 1e-9 after 50 steps."""

import clusters
import jobs
import numpy as np
import pytest

STEPS = 50
COMMON = dict(dtype="float64", optimizer="momentum", momentum=0.875, moving_average_decay=0.9, lookahead_every_steps=5,
              log_every_steps=1, summary_every_steps=0, save_every_steps=0, check_data=False)  # fmt: skip
ACCUMULATED = dict(workload="norm_workload", learning_rate=0.05, clip_gradients=0.5, batch_size=3)
GLOBAL = dict(workload="norm_workload", learning_rate=0.05, clip_gradients=0.5, sync_batch_norm=True)
REAL = dict(workload="cifar10", learning_rate=0.01, clip_gradients=5.0)
MIRRORED = dict(variable_update="mirrored", check_mirrors_every_steps=10)


@pytest.fixture(scope="module")
def one_tower(tmp_path_factory, cifar10_dir):
    """{name: directory} of single-tower runs: four batches of 3 a step, one of 12, the real network with one of 4."""
    runs_of_one = {
        "accumulated": ACCUMULATED | dict(accumulate_steps=4),
        "global": GLOBAL | dict(batch_size=12, sync_batch_norm=False),
        "real": REAL | dict(batch_size=4, data_dir=str(cifar10_dir), save_every_steps=10, keep_checkpoints=0),
    }
    found = {name: tmp_path_factory.mktemp(name) for name in runs_of_one}
    for name, options in runs_of_one.items():
        jobs.train_toy(found[name], **(COMMON | options | dict(num_gpus=1, max_steps=STEPS)))
    return found


def assert_same(directory, expected, steps=STEPS):
    """Losses of every step; weights, slots, moving statistics and moving averages after the last of these steps."""
    losses = [[record["loss"] for record in jobs.metrics(each)][:steps] for each in (directory, expected)]
    assert len(losses[1]) == steps
    np.testing.assert_allclose(*losses, rtol=1e-9)
    found, wanted = jobs.variables(directory, steps), jobs.variables(expected, steps)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9 * max(1, np.abs(value).max()), err_msg=name)


def train_together(directory, count, workload, steps=STEPS, **options):
    results = clusters.train_together(directory, count, workload, **(COMMON | dict(max_steps=steps) | options))
    assert [getattr(result, "step", result) for result in results] == [steps] * count


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (4, dict(num_gpus=1)),
        (2, dict(num_gpus=1, accumulate_steps=2)),
        (2, dict(num_gpus=2, **MIRRORED)),
    ],
    ids=["four workers", "two that accumulate", "two with two mirrored towers"],
)
def test_workers_are_one_tower_with_normalisation_accumulation_and_clipping(one_tower, tmp_path, workers, options):
    """The one tower takes its four batches one after the other, each normalised by itself as a tower's is."""
    train_together(tmp_path, workers, **(ACCUMULATED | options))
    assert_same(tmp_path, one_tower["accumulated"])


def test_four_workers_that_normalise_together_are_one_tower(one_tower, tmp_path):
    train_together(tmp_path, 4, **(GLOBAL | dict(batch_size=3, num_gpus=1)))
    assert_same(tmp_path, one_tower["global"])


@pytest.mark.parametrize(
    ("workers", "steps", "options"), [(4, 10, dict(num_gpus=1)), (2, STEPS, dict(num_gpus=2, **MIRRORED))],
    ids=["four workers", "two with two mirrored towers"],
)  # fmt: skip
def test_workers_are_one_tower_on_the_reference_network(one_tower, tmp_path, cifar10_dir, workers, steps, options):
    train_together(tmp_path, workers, steps=steps, batch_size=1, data_dir=str(cifar10_dir), **(REAL | options))
    assert_same(tmp_path, one_tower["real"], steps)


def test_a_run_moves_between_machines_and_ends_as_if_it_had_not(one_tower, tmp_path):
    """20 steps on the CPU of one, 20 mirrored on two with two towers each, 10 on one with four; all normalise over the
    global batch."""
    several = GLOBAL | dict(batch_size=3, variable_update="mirrored")
    jobs.train_toy(tmp_path, **(COMMON | GLOBAL | dict(num_gpus=1, batch_size=12, sync_batch_norm=False, max_steps=20)))
    results = clusters.train_together(
        tmp_path, 2, num_gpus=2, max_steps=40, eval_every_steps=30, **(COMMON | several | MIRRORED)
    )
    assert [getattr(result, "step", result) for result in results] == [40, 40]
    jobs.train_toy(tmp_path, **(COMMON | several | dict(num_gpus=4, max_steps=STEPS)))
    assert_same(tmp_path, one_tower["global"])
