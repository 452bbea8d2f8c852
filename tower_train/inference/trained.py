"""A run as those find it who use what it trained: its workload, its test examples, and the checkpoint to take."""

import dataclasses
import os
from collections.abc import Callable
from typing import TypeVar

from tower_train import errors
from tower_train.config import RunOptions
from tower_train.run_dir import best, checkpoint, directory
from tower_train.workload import DataRequest, Examples, Workload, load

T = TypeVar("T")


def read_run(options: RunOptions, workload: Workload | None = None) -> tuple[Workload, Examples, dict]:
    """Finds out what a run trained.

    Args:
      options: which run, and where its workload and data are if not where they were.
      workload: the run's; None imports it by the path in options or in run.json.

    Returns:
      The workload under the run's options and the command's, its test examples, and the config of run.json.

    Raises:
      RunError: no run there, or one of another workload.
      ConfigError: options.dataset is none of the workload's.
    """
    run_json = directory.RunDirectory(options.train_dir).read(directory.RUN)
    if not run_json:
        raise errors.RunError(
            f"--train_dir={options.train_dir} holds no run: {directory.RUN} is missing. Give the directory that the "
            "trainer names in its first lines."
        )
    path = options.workload or run_json["config"]["workload"]
    if not (workload or path):
        raise errors.RunError(
            f"--train_dir={options.train_dir} was trained from Python: add --workload=MODULE or --workload=MODULE:NAME "
            f"to say where its workload {run_json['workload']!r} is."
        )
    workload = workload or load(path)
    if workload.name != run_json["workload"]:
        raise errors.RunError(
            f"--train_dir={options.train_dir} is a run of workload {run_json['workload']}, not of {workload.name}. "
            "Give --workload=PATH of the one that was trained."
        )
    workload = workload.with_options(run_json.get("workload_options", {}))
    if options.single_view:
        workload = dataclasses.replace(workload, views=None)
    if options.dataset:
        workload.check_dataset(options.dataset)
    config = run_json["config"]
    data_dir, dataset = options.data_dir or config["data_dir"], options.dataset or run_json["dataset"]
    return workload, workload.examples(DataRequest("test", dataset, data_dir, config["seed"])), config


def use_checkpoint(run_dir: directory.RunDirectory, options: RunOptions, function: Callable[[str], T]) -> T:
    """What function(path) returns for the chosen checkpoint.

    While the run trains, that one may be removed for a newer one before it is read; then the newer one is taken.

    Raises:
      RunError: there is none, or function raises one.
    """
    while True:
        path = chosen(run_dir, options)
        try:
            return function(path)
        except errors.RunError:
            if os.path.exists(f"{path}.index"):
                raise


def chosen(run_dir: directory.RunDirectory, options: RunOptions) -> str:
    """The path of the newest checkpoint, or with options.best of the best one.

    Raises:
      RunError: there is none.
    """
    return best.path(run_dir) if options.best else newest(run_dir)


def newest(run_dir: directory.RunDirectory) -> str:
    """The path of the newest checkpoint.

    Raises:
      RunError: there is none.
    """
    path = checkpoint.latest(run_dir.path)
    if not path:
        raise errors.RunError(
            f"--train_dir={run_dir.path} holds no checkpoint yet. Wait until its trainer has saved one, as "
            "`python -m tower_train.evaluate --watch` does."
        )
    return path
