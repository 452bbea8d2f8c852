"""Evaluating the checkpoints of a run, after training or beside it."""

import contextlib
import time
from collections.abc import Iterator

from tower_train.config import EvaluateOptions
from tower_train.graph import devices
from tower_train.inference import evaluation, trained
from tower_train.run_dir import checkpoint, directory, events
from tower_train.workload import Workload


def evaluate_run(options: EvaluateOptions, workload: Workload | None = None) -> Iterator[evaluation.Evaluation]:
    """Evaluates the newest checkpoint of a run, or with options.watch each new one until the run's trainer has ended.

    Writes what it finds to the run's result.json and event files.

    Args:
      options: which run, and how.
      workload: the run's; None imports it by the path in options or in run.json.

    Yields:
      One Evaluation a checkpoint.

    Raises:
      RunError: no run there, no checkpoint, or one of another network.
    """
    run_dir = directory.RunDirectory(options.train_dir)
    workload, examples, config = trained.read_run(options, workload)
    if not options.watch:
        trained.chosen(run_dir, options)  # says that there is none before the graph is built
    evaluator = evaluation.Evaluator(
        workload, examples, options.batch_size, config["dtype"], 0 if options.raw else config["moving_average_decay"],
        devices.place(options),
    )  # fmt: skip
    with contextlib.closing(evaluator), contextlib.closing(open_curves(run_dir)) as writer:
        if options.watch:
            evaluations = _watched(run_dir, options, evaluator.evaluate)
        else:
            evaluations = [trained.use_checkpoint(run_dir, options, evaluator.evaluate)]
        for found in evaluations:
            run_dir.update(directory.RESULT, {"evaluation": found.as_dict()})
            write_curves(writer, found)
            yield found


def _watched(run_dir: directory.RunDirectory, options: EvaluateOptions, evaluate) -> Iterator[evaluation.Evaluation]:
    """What `evaluate` makes of each newest checkpoint, once, until the trainer has ended."""
    seen = None
    while True:
        # Asked before looking: what is saved after the look is seen in the next round, also when the trainer ends then.
        training = run_dir.is_locked()
        path = checkpoint.latest(run_dir.path)
        if path and checkpoint.step_of(path) != seen:
            found = trained.use_checkpoint(run_dir, options, evaluate)
            seen = found.step
            yield found
        elif training:
            time.sleep(options.watch_secs)
        else:
            break
    if seen is None:
        trained.newest(run_dir)


def open_curves(run_dir: directory.RunDirectory) -> events.EventWriter:
    """The event files of a run's evaluations, whose curves TensorBoard draws beside the training curves."""
    return events.open_writer(run_dir.path / "eval")


def write_curves(writer: events.EventWriter, found: evaluation.Evaluation, prefix: str = "") -> None:
    """Adds a point to each metric's curve; prefix: of the curves' names."""
    events.add_scalars(writer, {prefix + name: metric.mean for name, metric in found.metrics.items()}, found.step)
    writer.flush()
