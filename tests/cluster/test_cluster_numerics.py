"""Workers and towers, however they are mixed, train what one tower trains: in float64 to 1e-9."""

import clusters
import jobs
import pytest
import trainings

from tower_train.graph import loss_scale

STEPS = 20
COMMON = dict(
    dtype="float64", optimizer="momentum", momentum=0.875, ema=0.9, log_every_steps=1, summary_every_steps=0,
    save_every_steps=0, check_data=False, check_towers="never",
)  # fmt: skip
ACCUMULATED = dict(workload="norm_workload", learning_rate=0.05, clip_gradients=0.5, batch_size=3)
GLOBAL = dict(workload="norm_workload", learning_rate=0.05, clip_gradients=0.5, sync_batch_norm=True)
MIRRORED = dict(variable_update="mirrored", check_mirrors_every_steps=5)


@pytest.fixture(scope="module")
def one_tower(tmp_path_factory):
    """{name: directory} of single-tower runs: four batches of 3 a step, one of 12."""
    runs_of_one = {
        "accumulated": ACCUMULATED | dict(accumulate_steps=4),
        "global": GLOBAL | dict(batch_size=12, sync_batch_norm=False),
    }
    found = {name: tmp_path_factory.mktemp(name) for name in runs_of_one}
    for name, options in runs_of_one.items():
        jobs.train_toy(found[name], **(COMMON | dict(num_gpus=1, max_steps=STEPS) | options))
    return found


def assert_same(directory, expected):
    """Losses of every step; weights, slots, moving statistics and moving averages in the end."""
    losses = [[record["loss"] for record in jobs.metrics(each)] for each in (directory, expected)]
    assert len(losses[1]) == STEPS
    trainings.assert_same(*((losses[i], jobs.variables(each, STEPS)) for i, each in enumerate((directory, expected))))


@pytest.mark.parametrize(
    "options", [dict(num_gpus=1, accumulate_steps=2), dict(num_gpus=2, **MIRRORED)], ids=["accumulating", "mirrored"]
)
def test_workers_are_one_tower_with_normalisation_accumulation_and_clipping(one_tower, tmp_path, options):
    """The one tower takes its four batches one after the other, each normalised by itself as a tower's is."""
    results = clusters.train_together(tmp_path, 2, **(COMMON | ACCUMULATED | options | dict(max_steps=STEPS)))
    assert [getattr(result, "step", result) for result in results] == [STEPS] * 2
    assert_same(tmp_path, one_tower["accumulated"])


def test_two_workers_skip_the_same_steps_and_find_the_same_loss_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**18)
    options = COMMON | dict(workload="toy_workload", dtype="float16", learning_rate=0.05, batch_size=8, max_steps=6)
    options["save_every_steps"] = 2
    clusters.train_together(tmp_path / "two", 2, num_gpus=1, **options)
    jobs.train_toy(tmp_path / "one", num_gpus=2, **options)
    found, expected = jobs.variables(tmp_path / "two", 6), jobs.variables(tmp_path / "one", 6)
    assert expected["loss_scale/scale"] < 2.0**18 and expected["loss_scale/finite_steps"] > 1
    jobs.assert_identical(found, expected)


def test_a_run_moves_between_machines_and_ends_as_if_it_had_not(one_tower, tmp_path):
    """5 steps on the CPU of one, 10 mirrored on two with two towers each, 5 on one with four; all normalise over the
    global batch."""
    several = GLOBAL | dict(batch_size=3, variable_update="mirrored")
    jobs.train_toy(tmp_path, **(COMMON | GLOBAL | dict(num_gpus=1, batch_size=12, sync_batch_norm=False, max_steps=5)))
    results = clusters.train_together(
        tmp_path, 2, num_gpus=2, max_steps=15, eval_every_steps=10, **(COMMON | several | MIRRORED)
    )
    assert [getattr(result, "step", result) for result in results] == [15, 15]
    jobs.train_toy(tmp_path, **(COMMON | several | dict(num_gpus=4, max_steps=STEPS)))
    assert_same(tmp_path, one_tower["global"])
