"""A run on disk to be used: its workload, its test examples and its checkpoint."""

import dataclasses
import os
from collections.abc import Callable
from typing import TypeVar

from tower_train import errors
from tower_train.config import RunOptions
from tower_train.graph import kernels
from tower_train.run_dir import best, checkpoint, directory, manifest
from tower_train.workload import DataRequest, Examples, Workload, load

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run on disk: its directory, its workload under the run's and the command's options, its test examples.

    moving_average_decay is 0 if the weights themselves are used. takes_best: use the best checkpoint, not the newest.
    """

    directory: directory.RunDirectory
    workload: Workload
    examples: Examples
    dtype: str
    moving_average_decay: float
    takes_best: bool

    def checkpoint(self) -> str:
        """Returns the path of the checkpoint to use; RunError if there is none."""
        if self.takes_best:
            return best.path(self.directory)
        if newest := checkpoint.latest(self.directory.path):
            return newest
        raise errors.RunError(
            f"--train_dir={self.directory.path} holds no checkpoint yet. Wait until its trainer has saved one, as "
            "`python -m tower_train.evaluate --watch` does."
        )

    def use_checkpoint(self, function: Callable[[str], T]) -> T:
        """Returns function(path) for the checkpoint to use.

        While the run trains, a newer checkpoint may replace it before it is read; then that one is used.

        Raises:
          RunError: there is none, or function raises one.
        """
        failed = None
        while True:
            path = self.checkpoint()
            try:
                return function(path)
            except errors.RunError:
                if path == failed or os.path.exists(f"{path}.index"):
                    raise
                failed = path


def read(options: RunOptions, workload: Workload | None = None) -> SavedRun:
    """Finds a run, and sets this process to compute as it did. workload: None imports it by the path in options or
    run.json.

    Raises:
      RunError: no run there, a damaged one, or one of another workload.
      ConfigError: options.dataset is none of the workload's.
    """
    run_dir = directory.RunDirectory(options.train_dir)
    run_dir.check_files()
    run_json = run_dir.read(directory.RUN)
    if not run_json:
        raise errors.RunError(
            f"--train_dir={options.train_dir} holds no run: {directory.RUN} is missing. Give the directory that the "
            "trainer names in its first lines."
        )
    config = run_json["config"]
    path = options.workload or config["workload"]
    if not (workload or path):
        raise errors.RunError(
            f"--train_dir={options.train_dir} was trained from Python: add --workload=MODULE or --workload=MODULE:NAME "
            f"to say where its workload {run_json['workload']!r} is."
        )
    workload = workload or load(path, options.train_dir)
    if workload.name != run_json["workload"]:
        raise errors.RunError(
            f"--train_dir={options.train_dir} is a run of workload {run_json['workload']}, not of {workload.name}. "
            "Give --workload=PATH of the one that was trained."
        )
    try:
        workload = workload.with_options(run_json.get("workload_options", {}))
    except errors.ConfigError as error:
        raise errors.RunError(f"{run_dir.path / directory.RUN} does not fit its workload: {error}") from None
    manifest.check_dataset(run_dir.path, run_json, workload)
    if options.single_view:
        workload = dataclasses.replace(workload, views=None)
    if options.dataset:
        workload.check_dataset(options.dataset)
    data_dir, dataset = options.data_dir or config["data_dir"], options.dataset or run_json["dataset"]
    examples = workload.examples(DataRequest("test", dataset, data_dir, config["seed"]))
    kernels.choose(config.get("deterministic", False), config.get("tensor_float_32"))
    decay = 0.0 if options.raw else config["moving_average_decay"]
    return SavedRun(run_dir, workload, examples, config["dtype"], decay, options.best)
