"""Checkpoints: the original's names, as many as wanted, and errors that say what is wrong with one."""

import dataclasses

import jobs
import numpy as np
import pytest
import saving
import toy_workload

from tower_train import errors

LAYERS = {  # of the original: name, shape of weights
    "conv1": [5, 5, 3, 64], "conv2": [5, 5, 64, 64], "local3": [2304, 384], "local4": [384, 192],
    "softmax_linear": [192, 10],
}  # fmt: skip


def test_the_reference_workload_has_the_originals_names(cifar10_run):
    shapes = {name: list(value.shape) for name, value in jobs.variables(cifar10_run[0]).items()}
    expected = {"global_step": [], "examples_seen": []}
    for layer, weights in LAYERS.items():
        for suffix in ("", "/ExponentialMovingAverage"):
            expected[f"{layer}/weights{suffix}"] = weights
            expected[f"{layer}/biases{suffix}"] = weights[-1:]
    assert shapes == expected


def test_averages_that_a_checkpoint_lacks_begin_as_the_weights_that_it_has(tmp_path):
    jobs.train_toy(tmp_path, max_steps=3, ema=0, optimizer="sgd", summary_every_steps=0)
    jobs.train_toy(tmp_path, max_steps=4, ema=0.9, optimizer="sgd", summary_every_steps=0, override=True)
    before, after = jobs.variables(tmp_path, 3), jobs.variables(tmp_path, 4)
    decay = (1 + 3) / (10 + 3)
    for name in before.keys() - {"global_step", "examples_seen"}:
        expected = decay * before[name] + (1 - decay) * after[name]
        np.testing.assert_allclose(after[f"{name}/ExponentialMovingAverage"], expected, rtol=1e-5, atol=1e-7)


def _listed(directory):
    """The steps that TensorFlow's own `checkpoint` file lists, oldest first."""
    lines = (directory / "checkpoint").read_text().splitlines()
    return [int(line.rpartition("-")[2].rstrip('"')) for line in lines if line.startswith("all_model_checkpoint_paths")]


@pytest.mark.parametrize(("keep_at_first", "keep_then"), [(4, 2), (1, 3), (0, 1), (2, 0)])
def test_the_newest_checkpoints_are_kept_also_across_a_resume(keep_at_first, keep_then, tmp_path):
    saving.save(tmp_path, 5, 10, 15, 20, 25, keep=keep_at_first)
    kept = [5, 10, 15, 20, 25][-keep_at_first:]
    assert jobs.saved_steps(tmp_path) == _listed(tmp_path) == kept
    saving.save(tmp_path, 30, 35, 40, 45, 50, keep=keep_then)
    kept = (kept + [30, 35, 40, 45, 50])[-keep_then:]
    assert jobs.saved_steps(tmp_path) == _listed(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == 2 * len(kept) + 1


def test_where_all_checkpoints_were_removed_the_run_does_not_start_over_unasked(run):
    for path in run.glob("model.ckpt-*"):
        path.unlink()
    before = jobs.contents(run)
    with pytest.raises(errors.RunError, match=f"{run}/checkpoint lists checkpoints of which none is there"):
        jobs.train_toy(run, max_steps=45)
    assert jobs.contents(run) == before
    (run / "checkpoint").unlink()
    jobs.train_toy(run, max_steps=5)
    assert [record["step"] for record in jobs.metrics(run)] == [5]


def test_a_checkpoint_of_another_network_is_refused_with_the_variables_that_differ(run):
    def linear(features, training):
        return toy_workload.layer("softmax_linear", features, 3)

    before = jobs.contents(run)
    with pytest.raises(errors.RunError) as error:
        jobs.train_toy(run, max_steps=45, workload=dataclasses.replace(toy_workload.WORKLOAD, inference=linear))
    assert "softmax_linear/weights: graph float32[4, 3], checkpoint float32[8, 3]" in str(error.value)
    assert str(error.value).endswith("Give another --train_dir, or --override to initialise these variables afresh.")
    assert jobs.contents(run) == before
