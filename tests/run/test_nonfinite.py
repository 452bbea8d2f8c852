"""Steps that are not finite: skipped and counted, or the end of the run."""

import dataclasses
import math

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
from poisoned import EVERY_STEP, poisoned

from tower_train import errors


@pytest.mark.parametrize(
    ("value", "position", "step", "tower"),
    [(math.nan, 0, 1, 0), (math.inf, 168, 11, 1)],
)
def test_what_is_not_finite_is_named_by_step_and_tower(value, position, step, tower, tmp_path):
    assert (position // 16 + 1, position % 16 // 8) == (step, tower)
    with pytest.raises(errors.NonFiniteError) as error:
        jobs.train_toy(tmp_path, max_steps=40, workload=poisoned(position, position + 1, value), save_every_steps=5)
    assert error.value.exit_status == 3
    message = str(error.value)
    # The network's relu turns a NaN into 0, so that the loss stays finite; the gradient does not.
    loss = "the loss, " if value == math.inf else ""
    assert message.startswith(f"not finite at step {step}: tower_{tower}: {loss}the gradient of ")
    assert "the gradient of hidden/weights" in message
    assert f"tower_{1 - tower}" not in message and "\n" not in message
    # What was saved, and only that, stays; it is finite.
    assert jobs.saved_steps(tmp_path) == [saved for saved in (5, 10) if saved < step]
    for saved in jobs.saved_steps(tmp_path):
        assert all(np.isfinite(variable).all() for variable in jobs.variables(tmp_path, saved).values())
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == message
    if (tmp_path / "metrics.jsonl").exists():
        assert all(record["step"] < step and math.isfinite(record["loss"]) for record in jobs.metrics(tmp_path))


@pytest.mark.parametrize(
    "mode", [{}, dict(variable_update="mirrored", check_mirrors_every_steps=1)], ids=["cpu", "mirrored"]
)
def test_a_skipped_step_counts_and_changes_no_variable(mode, tmp_path, capsys):
    """Step 6 is skipped (positions 80 to 95): steps 5 and 6 leave the same variables, and step 7 takes position 96."""
    options = EVERY_STEP | mode | dict(save_every_steps=1, keep_checkpoints=0, on_nonfinite="skip")
    result = jobs.train_toy(tmp_path, max_steps=8, workload=poisoned(90, 91, math.inf), **options)
    assert (result.step, result.skipped_steps) == (8, 1)
    before, after = jobs.variables(tmp_path, 5), jobs.variables(tmp_path, 6)
    assert (after.pop("global_step"), after.pop("examples_seen")) == (6, 96)
    assert (before.pop("global_step"), before.pop("examples_seen")) == (5, 80)
    jobs.assert_identical(after, before)
    assert not np.array_equal(jobs.variables(tmp_path, 7)["hidden/weights"], after["hidden/weights"])
    assert [record["step"] for record in jobs.metrics(tmp_path)] == list(range(1, 9))
    assert [record["loss"] is None for record in jobs.metrics(tmp_path)] == [step == 6 for step in range(1, 9)]
    output = capsys.readouterr().out
    assert "*** not finite at step 6: tower_1: " in output
    assert "positions 80 to 95 of the stream" in output and "1 skipped since this start" in output


def test_ten_in_a_row_end_the_run(tmp_path):
    with pytest.raises(errors.NonFiniteError, match="not finite at step 12: .*It is number 10 in a row"):
        jobs.train_toy(tmp_path, workload=poisoned(32, 192), on_nonfinite="skip", max_steps=14, **EVERY_STEP)


def test_ten_that_are_not_in_a_row_do_not(tmp_path):
    """Nine before step 12 and nine after it."""
    before, after = poisoned(32, 176).augment, poisoned(192, 336).augment

    def spoil(features, draws):
        return tf.where((draws.positions < 192)[:, tf.newaxis], before(features, draws), after(features, draws))

    workload = dataclasses.replace(toy_workload.WORKLOAD, augment=spoil)
    result = jobs.train_toy(tmp_path, workload=workload, on_nonfinite="skip", max_steps=22, **EVERY_STEP)
    assert (result.step, result.skipped_steps) == (22, 18)


def test_the_result_is_that_of_the_last_step_before(tmp_path):
    jobs.train_toy(tmp_path, max_steps=2)
    with pytest.raises(errors.NonFiniteError) as error:
        jobs.train_toy(tmp_path, workload=poisoned(90, 91), max_steps=10, **EVERY_STEP)
    result = jobs.read_json(tmp_path, "result.json")
    assert (result["step"], result["stopped_by"]) == (5, str(error.value))
    assert result["loss"] == jobs.metrics(tmp_path)[-1]["loss"]
    assert result["checkpoint"] == f"{tmp_path}/model.ckpt-5"
    with pytest.raises(errors.NonFiniteError):
        jobs.train_toy(tmp_path, workload=poisoned(90, 91), max_steps=10, **EVERY_STEP)
    again = jobs.read_json(tmp_path, "result.json")  # a start without a step leaves what the others wrote
    assert again | {"started": result["started"]} == result


def test_what_overflows_in_the_update_itself_is_not_saved(tmp_path):
    """A gradient of 1e30 is finite, 1e30 times the learning rate is not."""

    def loss(logits, labels):
        return 1e30 * toy_workload.WORKLOAD.loss(logits, labels)

    jobs.train_toy(tmp_path, max_steps=2)
    workload = dataclasses.replace(toy_workload.WORKLOAD, loss=loss)
    with pytest.raises(errors.NonFiniteError, match="not finite after step 3: the update overflowed in hidden/.* more"):
        jobs.train_toy(tmp_path, workload=workload, max_steps=3, learning_rate=1e30)
    assert jobs.saved_steps(tmp_path) == [2]


def test_an_overflow_in_bfloat16_is_noticed_before_the_variables_change(tmp_path):
    """Finite features whose products overflow bfloat16, whose greatest number is 3.39e38."""
    options = EVERY_STEP | dict(workload=poisoned(90, 91, 3e38), dtype="bfloat16")
    with pytest.raises(errors.NonFiniteError, match="not finite at step 6: tower_1: "):
        jobs.train_toy(tmp_path, max_steps=10, **options)
    assert jobs.saved_steps(tmp_path) == [5]
    assert all(np.isfinite(value).all() for value in jobs.variables(tmp_path).values())
