"""The best checkpoint of a run by its evaluations, and early stopping.

best.json holds the best and the last evaluation, so that a killed run goes on counting. With --keep_best the best
checkpoint's files are in the folder best, which no rotation touches.
"""

import math
import os
import pathlib
import shutil

from tower_train import errors
from tower_train.config import Config
from tower_train.measures import MAX
from tower_train.run_dir import checkpoint, directory, disk, json_files, logs


def path(run_dir: directory.RunDirectory) -> str:
    """Returns the path of the best checkpoint; RunError if none was kept."""
    if kept := _kept(run_dir, run_dir.read(json_files.BEST)):
        return kept
    raise errors.RunError(
        f"--best: {run_dir.path / directory.BEST_FOLDER} holds no checkpoint. Train with --keep_best, or leave --best "
        "out for the newest one."
    )


def _kept(run_dir: directory.RunDirectory, state: dict) -> str | None:
    """Returns the path of the checkpoint that a state, of best.json, calls the best; None if it was not kept."""
    folder = run_dir.path / directory.BEST_FOLDER
    best = str(folder / f"{checkpoint.PREFIX}-{state.get('best', {}).get('step')}")
    return best if best in checkpoint.existing(folder) else None


class Best:
    """Compares evaluations by their first metric, whose higher or lower values are better. step: the last one done."""

    def __init__(self, run_dir: directory.RunDirectory, config: Config, num_examples: int, step: int):
        self._run_dir, self._keep, self._global_batch = run_dir, config.keep_best, config.global_batch
        # examples trained on without a gain after which the run ends; 0 for never
        self._patience = config.early_stopping_patience_epochs * num_examples
        self.is_used = self._keep or self._patience > 0  # else evaluations are not compared
        self._state = run_dir.read(json_files.BEST) if self.is_used else {}
        self._step = step

    def compare_by(self, name: str, mode: str | None) -> list[str]:
        """Sets the metric by which evaluations are compared, before the first one; returns lines to print. Forgets
        earlier starts that compared by another one, or kept no checkpoint. ConfigError if it is needed and unknown
        which values are best."""
        if self.is_used and mode is None:
            option = "keep_best" if self._keep else "early_stopping_patience_epochs"
            raise errors.ConfigError(
                f"--{option}: it is not known whether a higher or a lower {name!r} is better. Say so in the workload, "
                f"as in mode={{{name!r}: 'min'}}."
            )
        before = self._state
        if before and (before["metric"], before["mode"]) != (name, mode):
            why = f"Until now the {before['mode']} of {before['metric']} was the best, now the {mode} of {name} is."
        elif before and self._keep and not _kept(self._run_dir, before):
            why = f"The best checkpoint until now, of step {before['best']['step']}, was not kept."
        else:
            return []
        self._state = {}
        return [f"*** {why} It begins anew."]

    @property
    def is_news(self) -> bool:
        """Returns whether an evaluation of the last step done would be news."""
        return self.is_used and self._state.get("last", {}).get("step", 0) < self._step

    def note(self, evaluation, path: str) -> list[str]:
        """Compares an evaluation of the checkpoint at a path with the best one; returns lines to print."""
        if not self.is_used:
            return []
        self._step = max(self._step, evaluation.step)
        name, metric = next(iter(evaluation.metrics.items()))
        this = {"step": evaluation.step, "examples": evaluation.step * self._global_batch, "value": metric.mean}
        best, last = self._state.get("best"), max(this, self._state.get("last", this), key=lambda each: each["step"])
        is_best = best is None or _rank(metric.mean, metric.mode) > _rank(best["value"], metric.mode)
        best = this if is_best else best
        folder = self._run_dir.path / directory.BEST_FOLDER
        try:
            if is_best and self._keep:
                _copy(path, folder)
            self._state = {"metric": name, "mode": metric.mode, "best": best, "last": last}
            self._run_dir.write(json_files.BEST, self._state)
            if is_best and self._keep:
                checkpoint.remove_others(folder, [str(folder / os.path.basename(path))])  # named in the file until now
        except (OSError, errors.RunError) as error:
            return [f"*** The best checkpoint cannot be kept ({errors.reason(error)}). The run goes on."]
        if not is_best:
            return [f"best so far: {name} = {logs.as_text(best['value'])} at step {best['step']}"]
        return [f"best so far, kept in {folder}" if self._keep else "best so far"]

    @property
    def is_kept(self) -> bool:
        """Returns whether there is a best checkpoint."""
        return self._keep and "best" in self._state

    def closing_lines(self, split: str) -> list[str]:
        """Returns a line about the best evaluation, which was on the examples of a split, if there is one."""
        if not (best := self._state.get("best")):
            return []
        kept = f", kept in {self._run_dir.path / directory.BEST_FOLDER}" if self._keep else ""
        value = f"{self._state['metric']} = {logs.as_text(best['value'])}"
        return [f"Best:     {value} on {split} examples at step {best['step']}{kept}"]

    @property
    def is_over(self) -> bool:
        """Returns whether the run ends because its evaluations have not improved."""
        last = self._state.get("last")
        if not self._patience or not last or last["step"] > self._step:
            return False
        return last["examples"] - self._state["best"]["examples"] >= self._patience


def _rank(value: float, mode: str) -> float:
    """Returns a number that is higher for better values, lowest for NaN."""
    return -math.inf if math.isnan(value) else value if mode == MAX else -value


def _copy(path: str, folder: pathlib.Path) -> None:
    """Copies a checkpoint's files into the folder."""  # not by links, which not every file system has
    if folder.is_symlink():
        raise errors.RunError(f"{folder} is a symbolic link")  # what is removed here would be another folder's
    folder.mkdir(exist_ok=True)
    for file in checkpoint.list_files(folder / os.path.basename(path)):  # of an earlier start of the run
        file.unlink()
    for file in reversed(checkpoint.list_files(path)):
        disk.sync(shutil.copyfile(file, folder / file.name))
    disk.sync(folder)
    disk.sync(folder.parent)  # if the folder is new
