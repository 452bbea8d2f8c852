"""The best checkpoint of a run by the evaluations during it: kept, and how long ago it was.

best.json holds the best evaluation and the last one, so that a run that was killed goes on counting where it was. With
--keep_best the best checkpoint's files stand in the folder best, which no rotation touches.
"""

import os
import pathlib
import re
import shutil

from tower_train import errors
from tower_train.config import Config
from tower_train.run_dir import checkpoint, directory

FOLDER = "best"
NO_GAIN = "no gain"
_OURS = re.compile(rf"\.?{re.escape(checkpoint.PREFIX)}-\d+\.(index|data-\d{{5}}-of-\d{{5}})(\.\d+)?")


def path(run_dir: directory.RunDirectory) -> str:
    """The path of the best checkpoint.

    Raises:
      RunError: none was kept.
    """
    step = run_dir.read(directory.BEST).get("best", {}).get("step")
    kept = run_dir.path / FOLDER / f"{checkpoint.PREFIX}-{step}"
    if not os.path.exists(f"{kept}.index"):
        raise errors.RunError(
            f"--best: {run_dir.path / FOLDER} holds no checkpoint. Train with --keep_best, or leave --best out for the "
            "newest one."
        )
    return str(kept)


class Best:
    """Compares evaluations by their first metric, of which more is better.

    Args:
      run_dir: where the run is.
      config: keep_best and stop_after_no_gain_epochs; without either nothing is written.
      num_examples: in an epoch.
    """

    def __init__(self, run_dir: directory.RunDirectory, config: Config, num_examples: int):
        self._run_dir, self._config, self._num_examples = run_dir, config, num_examples
        self._is_used = config.keep_best or config.stop_after_no_gain_epochs
        self._state = run_dir.read(directory.BEST) if self._is_used else {}
        self._step = 0

    def note(self, evaluation, path: str) -> list[str]:
        """Takes notice of an evaluation of the checkpoint at a path; returns what to print."""
        if not self._is_used:
            return []
        self._step = evaluation.step
        name, metric = next(iter(evaluation.metrics.items()))
        last = {"step": evaluation.step, "examples": evaluation.step * self._config.global_batch, "value": metric.mean}
        before = self._state.get("best")
        is_best = before is None or metric.mean > before["value"]
        try:
            if is_best and self._config.keep_best:
                _keep(pathlib.Path(path), self._run_dir.path / FOLDER)
            self._state = {"metric": name, "best": last if is_best else before, "last": last}
            self._run_dir.write(directory.BEST, self._state)
            if is_best and self._config.keep_best:
                _remove_others(pathlib.Path(path), self._run_dir.path / FOLDER)
        except (OSError, errors.RunError) as error:
            return [f"*** The best checkpoint cannot be kept ({checkpoint.reason(error)}). The run goes on."]
        if not is_best:
            return [f"best so far: {name} = {before['value']:.3f} at step {before['step']}"]
        return [f"best so far, kept in {self._run_dir.path / FOLDER}"] if self._config.keep_best else ["best so far"]

    def begin(self, step: int) -> bool:
        """Begins at a step that the run goes on from; returns whether its evaluation was due when the run was killed
        and is still to be done."""
        self._step = step
        due = self._is_used and step and step % self._config.eval_every_steps == 0
        return bool(due and self._state.get("last", {}).get("step", 0) < step)

    @property
    def is_over(self) -> bool:
        """Whether the run ends for want of a gain."""
        patience, last = self._config.stop_after_no_gain_epochs, self._state.get("last")
        if not patience or not last or last["step"] > self._step:
            return False
        return last["examples"] - self._state["best"]["examples"] >= patience * self._num_examples

    @property
    def why(self) -> str:
        """Why it does."""
        return f"{NO_GAIN} for {self._config.stop_after_no_gain_epochs:g} epochs"


def _keep(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives a checkpoint's files a second name in the folder, or copies them where the file system cannot."""
    folder.mkdir(exist_ok=True)
    for file in sorted(file for file in os.listdir(path.parent) if checkpoint.is_file_of(file, path.name)):
        temporary = folder / f".{file}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(path.parent / file, temporary)
        except OSError:
            shutil.copyfile(path.parent / file, temporary)
        os.replace(temporary, folder / file)
        temporary.unlink(missing_ok=True)  # stays where the file had this name in the folder before


def _remove_others(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Removes the best checkpoint from before, its index first, and what was interrupted."""
    for file in sorted(os.listdir(folder), reverse=True):
        if _OURS.fullmatch(file) and not checkpoint.is_file_of(file, path.name):
            os.remove(folder / file)
