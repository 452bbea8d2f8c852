"""Runs on a tf.data dataset: their place in it is in the checkpoint, and what cannot be is one line."""

import dataclasses
import shutil

import element_workloads
import jobs
import pytest
import toy_workload
import trainings

from tower_train import errors
from tower_train.data import tf_data

OPTIONS = dict(workload="element_workloads:PIPELINE", dtype="float64", seed=3, learning_rate=0.001)
LAST_STEP = 30


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    jobs.train_toy(directory, max_steps=LAST_STEP, **OPTIONS)
    return directory


def test_a_killed_run_goes_on_as_if_nobody_had_killed_it(whole_run, tmp_path, capsys):
    options = OPTIONS | dict(max_steps=20, save_every_steps=15)
    killed = tmp_path / "killed"
    jobs.train_toy(tmp_path / "other", jobs.copy_after(17, tmp_path / "other", killed), **options)
    assert jobs.saved_steps(killed) == [15]
    for number, (assert_same, towers) in enumerate(
        (
            (jobs.assert_identical, dict(num_gpus=2)),
            (jobs.assert_close, dict(num_gpus=4, batch_size=4, variable_update="mirrored")),
        )
    ):
        run = shutil.copytree(killed, tmp_path / f"run{number}")
        jobs.train_toy(run, max_steps=LAST_STEP, keep_checkpoints=0, **(OPTIONS | towers))
        assert "(resumed at step 15)" in capsys.readouterr().out
        found, expected = (trainings.without_state(jobs.variables(folder)) for folder in (run, whole_run))
        assert found["global_step"] == LAST_STEP
        assert_same(found, expected)


def test_another_global_batch_begins_the_dataset_anew_and_says_so(whole_run, tmp_path, capsys):
    shutil.copytree(whole_run, tmp_path / "run")
    options = OPTIONS | dict(batch_size=4, max_steps=LAST_STEP + 5)
    with pytest.raises(errors.RunError, match="global batch was 16, now 8"):
        jobs.train_toy(tmp_path / "run", **options)
    jobs.train_toy(tmp_path / "run", override=True, **options)
    assert "initialised afresh: iterator/batches_of_8." in capsys.readouterr().out


def test_a_place_among_augmented_examples_is_none_among_those_that_devices_augment(tmp_path):
    """The state of an iterator holds examples as they leave it."""
    workload = dataclasses.replace(element_workloads.PIPELINE, augment=lambda features, draws: features * 2)
    options = OPTIONS | dict(workload=workload, save_every_steps=2)
    jobs.train_small(tmp_path / "run", max_steps=2, augment_on="host", **options)
    with pytest.raises(errors.RunError, match="iterator/batches_of_16_not_distorted"):
        jobs.train_small(tmp_path / "run", max_steps=4, augment_on="device", **options)


def claiming(count, make):
    """The toy workload on test data that claims to be of another length than it is."""

    def examples(request):
        if request.split == "train":
            return element_workloads.IN_ORDER.examples(request)
        return tf_data.examples("test", lambda: make(request), count, toy_workload.CLASSES)

    return dataclasses.replace(element_workloads.IN_ORDER, examples=examples)


def test_evaluation_refuses_another_number_of_examples_than_claimed(tmp_path):
    """In steps of 16, of which there is one more than should be needed."""
    workload = claiming(48, element_workloads.ending_uncounted)
    why = "failed: test: gave 50 examples or more, where there should be 48."
    with pytest.raises(errors.EvaluationError, match=why):
        jobs.train_small(tmp_path, workload=workload, max_steps=10, eval_every_steps=10)


@pytest.mark.parametrize(
    ("make", "given"),
    [(element_workloads.in_order, "50 examples"), (lambda r: element_workloads.ending(r).repeat(), "endless examples")],
)
def test_a_number_that_is_known_is_compared_before_the_first_step(make, given, tmp_path):
    with pytest.raises(errors.DataError, match=f"^test: gave {given}, where there should be 51"):
        jobs.train_small(tmp_path / "run", workload=claiming(51, make), max_steps=10, eval_at_end=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "batch_size", "text"),
    [
        ("ending", 16, "its dataset ends after 96 examples, and this run takes 112. Make it endless"),
        ("ending_uncounted", 16, "its dataset ended before the last step. Make it endless"),
        ("generator", 16, "its dataset cannot be saved in a checkpoint"),
        ("failing", 16, "the input failed: no such row"),  # in a step
        ("failing", 64, "the input failed: no such row"),  # before the first one
    ],
)
def test_a_dataset_that_will_not_do_is_one_line(make, batch_size, text, tmp_path):
    workload = element_workloads.workload(getattr(element_workloads, make))
    with pytest.raises(errors.DataError, match=f"^{make} train: {text}") as error:
        jobs.train_small(tmp_path / "ended", workload=workload, max_steps=7, batch_size=batch_size)
    assert "\n" not in str(error.value)
    if make == "ending":  # and is long enough
        assert jobs.train_small(tmp_path / "whole", workload=workload, max_steps=6).stopped_by == "last step"


def test_a_dataset_made_by_other_steps_is_refused(whole_run, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    renamed = dataclasses.replace(
        element_workloads.IN_ORDER,
        examples=lambda request: dataclasses.replace(
            element_workloads.IN_ORDER.examples(request), name=f"pipeline {request.split}"
        ),
    )
    with pytest.raises(errors.RunError, match="pipeline train: its dataset cannot be put where the checkpoint says"):
        jobs.train_toy(tmp_path / "run", max_steps=LAST_STEP + 5, **(OPTIONS | {"workload": renamed}))
