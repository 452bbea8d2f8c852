"""Checkpoints: as many as wanted; damaged ones are noticed and set aside; what interrupted writes left goes."""

import dataclasses
import os

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import errors
from tower_train.run_dir import checkpoint


def test_averages_that_a_checkpoint_lacks_begin_as_the_weights_that_it_has(tmp_path):
    jobs.train_small(tmp_path, max_steps=3)
    jobs.train_small(tmp_path, max_steps=4, ema=0.9, override=True)
    before, after = jobs.variables(tmp_path, 3), jobs.variables(tmp_path, 4)
    decay = (1 + 3) / (10 + 3)
    for name in before.keys() - {"global_step", "examples_seen"}:
        expected = decay * before[name] + (1 - decay) * after[name]
        np.testing.assert_allclose(after[f"{name}/ExponentialMovingAverage"], expected, rtol=1e-5, atol=1e-7)


def _listed(directory):
    """The steps that TensorFlow's own `checkpoint` file lists, oldest first."""
    lines = (directory / "checkpoint").read_text().splitlines()
    return [int(line.rpartition("-")[2].rstrip('"')) for line in lines if line.startswith("all_model_checkpoint_paths")]


@pytest.mark.parametrize(("keep_at_first", "keep_then"), [(4, 2), (2, 0)])
def test_the_newest_checkpoints_are_kept_also_across_a_resume(keep_at_first, keep_then, tmp_path):
    mine = [tmp_path / "notes.txt", tmp_path / "model.ckpt-5.old"]  # which nothing deletes
    for path in mine:
        path.write_text("mine")
    jobs.save_checkpoints(tmp_path, 5, 10, 15, 20, 25, keep=keep_at_first)
    kept = [5, 10, 15, 20, 25][-keep_at_first:]
    assert jobs.saved_steps(tmp_path) == _listed(tmp_path) == kept
    jobs.save_checkpoints(tmp_path, 30, 35, 40, 45, 50, keep=keep_then)
    kept = (kept + [30, 35, 40, 45, 50])[-keep_then:]
    assert jobs.saved_steps(tmp_path) == _listed(tmp_path) == kept
    assert [path.read_text() for path in mine] == ["mine"] * 2
    assert len(list(tmp_path.iterdir())) == 2 + 2 * len(kept) + 1


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
    linear = lambda features, training: toy_workload.layer("softmax_linear", features, 3)  # noqa: E731
    before = jobs.contents(run)
    with pytest.raises(errors.RunError) as error:
        jobs.train_toy(run, max_steps=45, workload=dataclasses.replace(toy_workload.WORKLOAD, inference=linear))
    assert "softmax_linear/weights: graph float32[4, 3], checkpoint float32[8, 3]" in str(error.value)
    assert str(error.value).endswith("Give another --train_dir, or --override to initialise these variables afresh.")
    assert jobs.contents(run) == before


DATA, INDEX = "data-00000-of-00001", "index"


@pytest.fixture
def saved(tmp_path):
    jobs.save_checkpoints(tmp_path, 5, 10)
    return tmp_path


def flip(path, offset, bit=3):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_is_noticed_or_changes_no_variable(saved):
    """The index ends in padding and in a block that nothing reads; a bit there is no damage."""
    path = saved / "model.ckpt-10"
    expected = jobs.variables(saved, 10)
    noticed = {}
    for suffix, every in ((DATA, 29), (INDEX, 1)):
        file = path.with_name(f"{path.name}.{suffix}")
        whole = file.read_bytes()
        noticed[suffix] = []
        for offset in range(0, len(whole), every):
            flip(file, offset, bit=offset % 8)
            noticed[suffix].append(checkpoint.damage(str(path)) is not None)
            if not noticed[suffix][-1]:
                jobs.assert_identical(jobs.variables(saved, 10), expected)
            file.write_bytes(whole)
    assert all(noticed[DATA])
    assert np.mean(noticed[INDEX]) > 0.5
    assert checkpoint.damage(str(path)) is None


DAMAGES = {
    "a flipped bit": lambda path: flip(path.with_suffix(f".ckpt-10.{DATA}"), 700),
    "data that lacks its last byte": lambda path: os.truncate(path.with_suffix(f".ckpt-10.{DATA}"), 2407),
    "an emptied index": lambda path: os.truncate(path.with_suffix(f".ckpt-10.{INDEX}"), 0),
    "missing data": lambda path: path.with_suffix(f".ckpt-10.{DATA}").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(damage, saved):
    damage(saved / "model.ckpt")
    before = {path.name: content for path, content in jobs.contents(saved).items() if "-10." in path.name}
    newest, notes = checkpoint.newest_intact(saved)
    assert newest == str(saved / "model.ckpt-5")
    [note] = notes
    assert f"{saved}/model.ckpt-10 is damaged (" in note and "\n" not in note
    assert ("its file model.ckpt-10.data-00000-of-00001 is missing" in note) is (damage is DAMAGES["missing data"])
    assert "set aside as damaged-model.ckpt-10" in note
    for name, content in before.items():
        assert (saved / f"damaged-{name}").read_bytes() == content
    assert jobs.saved_steps(saved) == [5]
    assert tf.train.latest_checkpoint(str(saved)) == str(saved / "model.ckpt-5")
    assert checkpoint.newest_intact(saved) == (newest, [])


def test_a_checkpoint_that_this_user_may_not_read_is_refused_and_not_set_aside(saved, monkeypatch):
    DAMAGES["an emptied index"](saved / "model.ckpt")  # so does one without permission look, but to root
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(errors.RunError, match=r"model\.ckpt-10\.index cannot be read: this user has no permission"):
        checkpoint.newest_intact(saved)
    assert jobs.saved_steps(saved) == [5, 10]


def test_where_all_are_damaged_nothing_is_renamed_and_no_run_starts_over(saved):
    for step in (5, 10):
        flip(saved / f"model.ckpt-{step}.{DATA}", 700)
    before = jobs.contents(saved)
    with pytest.raises(errors.RunError, match=r"all its checkpoints are damaged \(2; the newest, .*model.ckpt-10: "):
        checkpoint.newest_intact(saved)
    assert jobs.contents(saved) == before


@pytest.mark.parametrize("content", [None, b'model_checkpoint_path: "mod', b"\xff\xfe\x00"])
def test_without_tensorflows_list_the_files_tell_which_checkpoint_is_the_newest(content, saved):
    (saved / "checkpoint").unlink()
    if content is not None:
        (saved / "checkpoint").write_bytes(content)
    assert checkpoint.newest_intact(saved) == (str(saved / "model.ckpt-10"), [])
    assert tf.train.latest_checkpoint(str(saved)) == str(saved / "model.ckpt-10")


def test_only_what_interrupted_writes_left_is_removed(saved):
    data = f"model.ckpt-15.{DATA}"
    left = ["model.ckpt-15.index.tempstate123", f"{data}.tempstate9876543210", data]
    left += [".checkpoint.0123abcd", ".run.json.00000000", ".metrics.jsonl.ffffffff"]
    mine = ["notes.txt", "model.ckpt-7.old", "model.ckpt-15.txt"]
    mine += [".run.json.lock", "checkpoint.tmp", ".run.json.bak"]
    for name in left + mine:
        (saved / name).write_text("x")
    before = jobs.contents(saved)
    checkpoint.remove_leftovers(saved)
    assert jobs.contents(saved) == {path: content for path, content in before.items() if path.name not in left}


def test_a_run_goes_on_from_before_the_damage_and_ends_as_if_there_were_none(toy_run, run, capsys):
    flip(run / f"model.ckpt-40.{DATA}", 100)
    (run / "model.ckpt-60.index.tempstate1").write_text("x")
    result = jobs.train_toy(run, max_steps=40)
    assert jobs.read_json(run, "result.json")["seconds"] == result.seconds, "not of the start before"
    output = capsys.readouterr().out
    assert "(resumed at step 20)" in output
    assert f"*** Checkpoint {run}/model.ckpt-40 is damaged (" in output
    assert (run / f"damaged-model.ckpt-40.{DATA}").exists()
    assert not (run / "model.ckpt-60.index.tempstate1").exists()
    jobs.assert_identical(jobs.variables(run), jobs.variables(toy_run, 40))
    assert jobs.metrics_but_times(run) == jobs.metrics_but_times(toy_run)


def test_a_list_that_cannot_be_corrected_is_one_line(saved, monkeypatch):
    """As on a full disk, where the newest is damaged too."""
    flip(saved / f"model.ckpt-10.{DATA}", 9)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.disk, "replace", full)
    with pytest.raises(errors.RunError, match=r"checkpoint cannot be written \(No space left on device\). Make room."):
        checkpoint.newest_intact(saved)
