"""--seeds: one training for each seed, one after the other, and the mean of their results."""

import dataclasses
import pathlib
import shlex
import statistics
import time
from collections.abc import Callable, Sequence

from tower_train import errors
from tower_train.cluster.task import find_task
from tower_train.config import Config
from tower_train.console import say
from tower_train.examples import TEST, VALIDATION
from tower_train.inference.saved_run import RESULT_NAMES
from tower_train.run.messages import python
from tower_train.run.results import Result
from tower_train.run_dir import json_files


def train_each(seeds: Sequence[int], config: Config, name: str, train: Callable[[Config], Result]) -> int:
    """Trains with each seed in train_dir/seed-SEED, or resumes the run there; prints mean and deviation;
    returns the exit status. ConfigError if a seed comes twice, there are several workers, or train_dir is a run."""
    folder = pathlib.Path(config.train_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    shown = f"--seeds={','.join(map(str, seeds))}"
    if len(set(seeds)) != len(seeds):
        raise errors.ConfigError(f"{shown} names a seed twice. Name each once.")
    if config.elastic or not find_task(config.worker_hosts, config.task_index).is_alone:
        raise errors.ConfigError(f"{shown} is for one process. Start each seed as a run of its own on several.")
    if folder.name in [f"seed-{seed}" for seed in seeds] and (folder / json_files.RUN).exists():
        folder = folder.parent  # "Resume:" of a seed names it
    if (folder / json_files.RUN).exists():
        raise errors.ConfigError(f"{shown}: {folder} is a run itself. Give another --train_dir for those of the seeds.")
    for number, seed in enumerate(seeds, start=1):
        say(f"seed:     {seed} ({number} of {len(seeds)})")
        result = train(dataclasses.replace(config, seed=seed, train_dir=str(folder / f"seed-{seed}")))
        if result.reason.exit_status:  # a signal, which is meant for all
            return result.reason.exit_status
    say(*lines([json_files.read(folder / f"seed-{seed}" / json_files.RESULT) for seed in seeds]))
    say(f"Curves:   {python()} -m tower_train.curves {shlex.quote(str(folder))}")
    return 0


def lines(results: Sequence[dict]) -> list[str]:
    """Returns lines about the last evaluations of runs with different seeds, from their result.json: the mean and the
    standard deviation."""
    # the test examples if all runs have them, as validation examples may have chosen their checkpoints
    for name in (RESULT_NAMES[split] for split in (TEST, VALIDATION)):
        if all(name in result for result in results):
            metrics = [result[name]["metrics"] for result in results]
            values = {metric: [each.get(metric, {}).get("mean") for each in metrics] for metric in metrics[0]}
            heading = f"{len(results)} seeds, {results[0][name]['num_examples']} examples of {results[0][name]['data']}"
            return [heading, *(f"{metric} = {_summary(each)}" for metric, each in values.items())]
    return [f"{len(results)} seeds, and no evaluation of all: --eval_at_end makes one."]


def _summary(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]  # those that are not finite are null in the file
    shown = ", ".join("unknown" if value is None else f"{value:.4g}" for value in values)
    if len(known) < 2:
        return shown
    return f"{statistics.fmean(known):.4g} (deviation {statistics.stdev(known):.2g}; of each {shown})"
