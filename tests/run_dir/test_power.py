"""A loss of power at any moment leaves a whole checkpoint, a list that names whole ones, and a whole best one.

The disk is modelled: before and after each of Python's calls to it, the test notes what it may hold. Contents are there
as they were synced; a file that never was is empty. Names are there as they are now, or as when their folder was
synced, or so but for one of them, which is the other way.
"""

import os
import shutil
import stat
import types

import jobs
import pytest
import tensorflow as tf

from tower_train.config import Config
from tower_train.inference.evaluator import Metric
from tower_train.run_dir import best, checkpoint, directory


class Disk:
    """The part of a folder that outlives a loss of power.

    Attributes:
      saved: what the test has saved so far, to be noted with each state.
      states: (saved, {path: content}) so far.
    """

    def __init__(self, root, patch):
        self._root, self.saved, self.states = root, None, []
        self._files, self._contents, self._names = {}, {}, {}  # open, so that no inode is used again; by inode; synced
        for name in ("fsync", "replace", "rename", "link", "unlink", "remove", "mkdir"):
            patch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name, call):
        def noting(*arguments, **options):
            self.note()
            result = call(*arguments, **options)
            if name == "fsync":
                self._sync(os.fstat(arguments[0]))
            self.note()
            return result

        return noting

    def _sync(self, status):
        if stat.S_ISDIR(status.st_mode):
            [folder] = [f for f in (self._root, *self._root.rglob("*")) if os.path.samestat(f.stat(), status)]
            self._names[folder] = {path: path.stat().st_ino for path in folder.iterdir()}
        elif status.st_ino in self._files:
            self._files[status.st_ino].seek(0)
            self._contents[status.st_ino] = self._files[status.st_ino].read()

    def note(self):
        now = {path: path.stat().st_ino for path in self._root.rglob("*")}
        for path, inode in now.items():
            if path.is_file() and inode not in self._files:
                self._files[inode] = open(path, "rb")
        synced = dict(self._names.get(self._root, {}))
        for folder in [path for path in synced if path.is_dir()]:
            synced |= self._names.get(folder, {})
        changes = {path: now.get(path) for path in {**now, **synced} if now.get(path) != synced.get(path)}
        orders = [names | {path: new.get(path)} for names, new in ((synced, now), (now, synced)) for path in changes]
        for names in (now, synced, *orders):
            state = {
                str(path.relative_to(self._root)): self._contents.get(inode, b"")
                for path, inode in names.items()
                if inode in self._files
            }
            if (self.saved, state) not in self.states:
                self.states.append((self.saved, state))

    def restored(self, folder):
        """Yields (saved, a folder with a state's files) of all states."""
        for number, (saved, state) in enumerate(self.states):
            for name, content in state.items():
                path = folder / str(number) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield saved, folder / str(number)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def in_states(disk, folder, name, look):
    """{(saved by the test, found by a look)} in the states in which something was saved or a file is there."""
    found = {(saved, look(state)) for saved, state in disk.restored(folder) if saved or (state / name).exists()}
    assert all(step >= (saved or 0) for saved, step in found)
    return found


def test_a_checkpoint_and_the_list_of_them(run, tmp_path, monkeypatch):
    disk = Disk(run, monkeypatch)
    for step in (5, 10, 15):
        jobs.save_checkpoints(run, step, keep=1)
        disk.saved = step
        disk.note()
    monkeypatch.undo()

    def newest(folder):
        listed = tf.train.latest_checkpoint(str(folder))
        assert listed and checkpoint.damage(listed) is None, sorted(folder.iterdir())
        return checkpoint.saved_step(checkpoint.newest_intact(folder)[0])

    steps = in_states(disk, tmp_path / "restored", "checkpoint", newest)
    assert steps >= {(5, 5), (5, 10), (10, 10), (10, 15), (15, 15)}, "also in the middle of a save"


def test_the_best_checkpoint_and_the_file_that_names_it(run, tmp_path, monkeypatch):
    copied, copyfile = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda source, to: copied.append(to.suffix) or copyfile(source, to))
    config = Config(keep_best=True, eval_every_steps=5)
    disk, compared = Disk(run, monkeypatch), best.Best(directory.RunDirectory(run), config, 16, 0)
    for step, value in ((5, 0.5), (10, 0.4), (15, 0.6), (20, 0.7)):
        metrics = {"precision": Metric(value, mode="max")}
        compared.note(types.SimpleNamespace(step=step, metrics=metrics), jobs.save_checkpoints(run, step, keep=1))
        disk.saved = step if step != 10 else 5
        disk.note()
    monkeypatch.undo()

    def kept(folder):
        path = best.path(directory.RunDirectory(folder))
        assert checkpoint.damage(path) is None
        return checkpoint.saved_step(path)

    assert copied[1::2] == [".index"] * 3  # last, as it makes a checkpoint whole
    steps = in_states(disk, tmp_path / "restored", "best.json", kept)
    assert steps >= {(5, 5), (5, 15), (15, 15), (15, 20), (20, 20)}
