"""Workers and towers, however they are mixed, train what one tower trains: in float64 to 1e-9."""

import clusters
import jobs
import pytest
import trainings

from tower_train.graph import loss_scale

STEPS = 20
COMMON = clusters.NORM | dict(momentum=0.875)
MIRRORED = dict(variable_update="mirrored", check_mirrors_every_steps=5)


@pytest.fixture(scope="module")
def one_tower(tmp_path_factory):
    """{batches of a step of 12 examples: directory} of runs of a single tower."""
    found = {batches: tmp_path_factory.mktemp("one tower") for batches in (4, 2, 1)}
    for batches, directory in found.items():
        options = dict(accumulate_steps=batches, batch_size=12 // batches, max_steps=STEPS)
        jobs.train_toy(directory, **(COMMON | options))
    return found


def assert_same(directory, expected):
    """Losses of every step; weights, slots, moving statistics and moving averages in the end."""
    losses = [[record["loss"] for record in jobs.metrics(each)] for each in (directory, expected)]
    assert len(losses[1]) == STEPS
    trainings.assert_same(*((losses[i], jobs.variables(each, STEPS)) for i, each in enumerate((directory, expected))))


@pytest.mark.parametrize(
    ("options", "turns"),
    [(dict(num_gpus=1, accumulate_steps=2, batch_norm="global"), 2), (dict(num_gpus=2, **MIRRORED), 4)],
    ids=["accumulating", "mirrored"],
)
def test_workers_are_one_tower_with_normalisation_accumulation_and_clipping(one_tower, tmp_path, options, turns):
    """The one tower takes its batches one after the other, each normalised by itself: as all towers' of a turn are, or
    as each tower's is."""
    results = clusters.train_together(tmp_path, 2, **(COMMON | options | dict(max_steps=STEPS)))
    assert [getattr(result, "step", result) for result in results] == [STEPS] * 2
    assert_same(tmp_path, one_tower[turns])


def test_two_workers_skip_the_same_steps_and_find_the_same_loss_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**18)
    options = COMMON | dict(workload="toy_workload", dtype="float16", batch_size=8, max_steps=6, save_every_steps=2)
    clusters.train_together(tmp_path / "two", 2, **options)
    jobs.train_toy(tmp_path / "one", **(options | dict(num_gpus=2)))
    found, expected = jobs.variables(tmp_path / "two", 6), jobs.variables(tmp_path / "one", 6)
    assert expected["loss_scale/scale"] < 2.0**18 and expected["loss_scale/finite_steps"] > 1
    jobs.assert_identical(found, expected)


def test_a_run_moves_between_machines_and_ends_as_if_it_had_not(one_tower, tmp_path):
    """5 steps on the CPU of one, 10 mirrored on two with two towers each, 5 on one with four; all normalise over the
    global batch."""
    over_all = COMMON | dict(batch_norm="global")
    several = over_all | dict(variable_update="mirrored")
    jobs.train_toy(tmp_path, **(over_all | dict(batch_size=12, max_steps=5)))
    on_two = several | MIRRORED | dict(num_gpus=2, max_steps=15, eval_every_steps=10)
    results = clusters.train_together(tmp_path, 2, **on_two)
    assert [getattr(result, "step", result) for result in results] == [15, 15]
    jobs.train_toy(tmp_path, **(several | dict(num_gpus=4, max_steps=STEPS)))
    assert_same(tmp_path, one_tower[1])
