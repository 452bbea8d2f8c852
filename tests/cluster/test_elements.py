"""Several workers on a tf.data dataset: what one worker trains on, also after kills; what is refused."""

import dataclasses
import shutil

import clusters
import element_workloads
import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import errors

OPTIONS = jobs.TOY | dict(num_gpus=1, dtype="float64", seed=3, learning_rate=0.001, keep_checkpoints=0)
BATCH = 16  # of two workers


def train_together(directory, **options):
    return clusters.train_together(directory, 2, **(OPTIONS | options))


def keep_only(train_dir, step):
    for path in [*train_dir.glob("model.ckpt-*"), *train_dir.glob("checkpoint")]:
        if not path.name.startswith(f"model.ckpt-{step}."):
            path.unlink()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """Two workers of two towers, as a kill between two saves leaves them: with the checkpoint of step 5."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    options = dict(workload=element_workloads.PIPELINE, num_gpus=2, batch_size=4, save_every_steps=5)
    train_together(directory, max_steps=7, **options)
    keep_only(directory, 5)
    return directory


def test_killed_workers_go_on_elsewhere_as_if_one_had_trained_and_nobody_had_killed_it(killed_run, tmp_path):
    """On other ports, with half as many towers."""
    shutil.copytree(killed_run, tmp_path / "run")
    options = dict(workload=element_workloads.PIPELINE, save_every_steps=7, max_steps=9)
    results = train_together(tmp_path / "run", **options)
    assert [result.step for result in results] == [9, 9]
    assert jobs.saved_steps(tmp_path / "run") == [5, 7, 9]
    jobs.train_toy(tmp_path / "one", **(OPTIONS | options | dict(batch_size=BATCH)))
    found, expected = (trainings.without_state(jobs.variables(tmp_path / name, 9)) for name in ("run", "one"))
    jobs.assert_close(found, expected)


def test_another_number_of_workers_is_refused_or_begins_an_epoch(killed_run, tmp_path, capsys):
    shutil.copytree(killed_run, tmp_path / "run")
    options = OPTIONS | dict(workload=element_workloads.UNDISTORTED, batch_size=BATCH, max_steps=5 + 6)
    with pytest.raises(errors.RunError, match="ckpt-5: workers were 2, now 1, and it .* --override, which begins"):
        jobs.train_toy(tmp_path / "run", **options)
    found = []

    def noting(features, training):
        noted = tf.numpy_function(lambda each: found.append(each) or each, [features], features.dtype)
        return toy_workload.network(tf.ensure_shape(noted, features.shape), training)

    options |= dict(workload=dataclasses.replace(element_workloads.UNDISTORTED, inference=noting), override=True)
    jobs.train_toy(tmp_path / "run", **options)
    assert "initialised afresh: " in capsys.readouterr().out
    rows, expected = np.float32(np.concatenate(found)), element_workloads.arrays("train")[0] + 1
    np.testing.assert_array_equal(sorted(map(tuple, rows)), sorted(map(tuple, expected)))


def test_elements_that_end_for_one_worker_first_end_all(tmp_path):
    """After its first batch of the three that there are; nobody could tell how many."""
    workload = element_workloads.workload(element_workloads.ending_uncounted)
    results = train_together(tmp_path, workload=workload, batch_size=32, max_steps=4, worker_timeout_secs=5.0)
    assert [type(result) for result in results] == [errors.WorkerError, errors.DataError]
    for result in results:
        assert "ending_uncounted train: its dataset ended before the last step. Make it endless" in str(result)
        assert result.exit_status == 2


def test_batches_in_turn_that_all_workers_normalise_together_are_refused(tmp_path):
    options = dict(workload="element_workloads:NORMALIZED", accumulate_steps=2, batch_size=4, max_steps=2)
    for error in train_together(tmp_path, **options):
        assert isinstance(error, errors.ConfigError) and "\n" not in str(error)
        assert str(error).startswith("--accumulate_steps=2: workload elements normalises batches (tower_0/matmul) over")
