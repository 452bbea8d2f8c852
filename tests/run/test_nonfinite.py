"""Steps that are not finite: skipped and counted, or the end of the run, as copies of a variable that differ."""

import dataclasses
import math

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import errors

v1 = tf.compat.v1
TOWERS = dict(num_gpus=2, batch_size=8)


def network(features, training):
    """As the toy workload's, but that a NaN in the hidden layer is 0: the loss stays finite, the gradient does not."""
    hidden = toy_workload.layer("hidden", features, 8)
    return toy_workload.layer("softmax_linear", tf.where(hidden > 0, hidden, 0), 3)


@pytest.mark.parametrize(
    ("value", "position", "step", "tower", "dtype"),
    [
        (math.nan, 0, 1, 0, "float32"),
        (3e38, 90, 6, 1, "bfloat16"),  # finite features whose products overflow bfloat16, whose greatest is 3.39e38
    ],
)
def test_what_is_not_finite_is_named_by_step_and_tower(value, position, step, tower, dtype, tmp_path):
    assert (position // 16 + 1, position % 16 // 8) == (step, tower)
    workload = dataclasses.replace(toy_workload.poisoned(position, position + 1, value), inference=network)
    options = jobs.EVERY_STEP | TOWERS | dict(workload=workload, max_steps=40, dtype=dtype)
    with pytest.raises(errors.NonFiniteError) as error:
        jobs.train_small(tmp_path, **options)
    assert error.value.exit_status == 3
    message = str(error.value)
    loss = "" if math.isnan(value) else "the loss, "
    assert message.startswith(f"not finite at step {step}: tower_{tower}: {loss}the gradient of ")
    assert "the gradient of hidden/weights" in message
    assert f"tower_{1 - tower}" not in message and "\n" not in message
    # What was saved, and only that, stays; it is finite.
    assert jobs.saved_steps(tmp_path) == [5] * (step > 5)
    for saved in jobs.saved_steps(tmp_path):
        assert all(np.isfinite(variable).all() for variable in jobs.variables(tmp_path, saved).values())
    result = jobs.read_json(tmp_path, "result.json")
    assert (result["step"], result["stopped_by"]) == (step - 1, message)
    if step > 1:
        assert [record["step"] for record in jobs.metrics(tmp_path)] == list(range(1, step))
        assert math.isfinite(result["loss"]) and result["loss"] == jobs.metrics(tmp_path)[-1]["loss"]
        assert result["checkpoint"] == f"{tmp_path}/model.ckpt-{step - 1}"
        with pytest.raises(errors.NonFiniteError):
            jobs.train_small(tmp_path, **options)
        again = jobs.read_json(tmp_path, "result.json")  # a start without a step leaves what the others wrote
        assert again | {"started": result["started"]} == result


@pytest.mark.parametrize(
    "mode", [{}, dict(variable_update="mirrored", check_mirrors_every_steps=1)], ids=["cpu", "mirrored"]
)
def test_a_skipped_step_counts_and_changes_no_variable(mode, tmp_path, capsys):
    """Step 6 is skipped (positions 80 to 95): steps 5 and 6 leave the same variables, and step 7 takes position 96."""
    options = jobs.EVERY_STEP | TOWERS | mode | dict(save_every_steps=1, keep_checkpoints=0, on_nonfinite="skip")
    result = jobs.train_small(tmp_path, max_steps=8, workload=toy_workload.poisoned(90, 91, math.inf), **options)
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


def test_what_overflows_in_the_update_itself_is_not_saved(tmp_path):
    """A gradient of 1e30 is finite, 1e30 times the learning rate is not."""
    workload = dataclasses.replace(toy_workload.WORKLOAD, loss=lambda o, y: 1e30 * toy_workload.WORKLOAD.loss(o, y))
    with pytest.raises(errors.NonFiniteError, match="not finite after step 1: the update overflowed in hidden/.* more"):
        jobs.train_small(tmp_path, workload=workload, max_steps=1, learning_rate=1e30)
    assert not jobs.saved_steps(tmp_path)


def test_ten_in_a_row_end_the_run_and_eighteen_of_which_one_is_finite_do_not(tmp_path):
    """Steps 3 to 11 and 13 to 22 are not finite."""
    before, after = toy_workload.poisoned(32, 176).augment, toy_workload.poisoned(192, 352).augment

    def spoil(features, draws):
        return tf.where((draws.positions < 192)[:, tf.newaxis], before(features, draws), after(features, draws))

    workload = dataclasses.replace(toy_workload.WORKLOAD, augment=spoil)
    with pytest.raises(errors.NonFiniteError, match="not finite at step 22: .*It is number 10 in a row"):
        jobs.train_small(tmp_path, workload=workload, on_nonfinite="skip", max_steps=24)


def test_copies_that_differ_by_a_bit_end_the_run_before_it_saves(tmp_path, monkeypatch):
    begun = jobs.begun(monkeypatch)

    def disturb():
        """Changes the last bit of one number in one copy."""
        session, copies = begun[0].session, begun[0].graph.graph.get_collection(v1.GraphKeys.LOCAL_VARIABLES)
        copy = next(each for each in copies if each.op.name == "copy_1/hidden/weights/Momentum")
        value = session.run(copy)
        value.view(np.int64)[1, 2] ^= 1
        session.run(copy.initializer, {copy.initializer.inputs[1]: value})

    options = dict(dtype="float64", variable_update="mirrored", check_mirrors_every_steps=3, save_every_steps=3)
    options |= TOWERS | dict(optimizer="momentum")
    with pytest.raises(errors.MirrorError, match=r"after step 6 copy 1 of (hidden|softmax_linear)/.* copy 0 is"):
        jobs.train_small(tmp_path, {5: disturb}, max_steps=9, **options)
    assert jobs.saved_steps(tmp_path) == [3]
    assert "after step 6" in jobs.read_json(tmp_path, "result.json")["stopped_by"]
