"""The evaluation of a run on disk, also while it trains, and its curves."""

import contextlib
import time
from collections.abc import Iterator

from tower_train import console, errors
from tower_train.config import EvaluateOptions
from tower_train.graph import devices
from tower_train.inference import saved_run
from tower_train.inference.evaluator import Evaluation, Evaluator
from tower_train.run_dir import checkpoint, directory, logs
from tower_train.workload import Workload


def evaluate_run(options: EvaluateOptions, workload: Workload | None = None) -> Iterator[Evaluation]:
    """Evaluates a run's newest checkpoint, or with options.watch each new one until its trainer has ended.

    Writes each evaluation to the run's result.json and event files, or says on standard error that it cannot.

    Args:
      options: the run and the way to evaluate it.
      workload: the run's; None imports it by the path in options or in run.json.

    Yields:
      One Evaluation per checkpoint.

    Raises:
      RunError: no run there, no checkpoint, one of another network, or a damaged result.json.
    """
    placed = devices.place(options)  # before anything uses a device
    run = saved_run.read(options, workload)
    run.directory.read(directory.RESULT)
    if not options.watch:
        run.checkpoint()  # raises if there is none, before the graph is built
    evaluator = Evaluator(run.workload, run.examples, options.batch_size, run.dtype, run.moving_average_decay, placed)
    with contextlib.closing(evaluator), contextlib.closing(open_curves(run.directory)) as writer:
        if options.watch:
            evaluations = _watched(run, evaluator, options.watch_secs)
        else:
            evaluations = [run.use_checkpoint(evaluator.evaluate)]
        for evaluation in evaluations:
            if _is_kept(run.directory, evaluation) or options.watch:
                write_curves(writer, evaluation)
            yield evaluation


def _is_kept(run_dir: directory.RunDirectory, evaluation: Evaluation) -> bool:
    """Writes an evaluation to result.json; says so if it cannot, as on a read-only run."""
    try:
        run_dir.update(directory.RESULT, {"evaluation": evaluation.as_dict()})
    except errors.RunError as error:
        console.notice(console.one_line(f"the evaluation of step {evaluation.step} is shown, not kept: {error}"))
        return False
    return True


def open_curves(run_dir: directory.RunDirectory) -> logs.EventWriter:
    """Opens the event files of a run's evaluations, which TensorBoard draws beside the training curves."""
    return logs.EventWriter(run_dir.path / "eval")


def write_curves(writer: logs.EventWriter, evaluation: Evaluation, prefix: str = "") -> None:
    """Adds a point to each metric's curve, whose name begins with `prefix`."""
    means = {prefix + name: metric.mean for name, metric in evaluation.metrics.items()}
    logs.add_scalars(writer, means, evaluation.step)


def _watched(run: saved_run.SavedRun, evaluator: Evaluator, pause_secs: float) -> Iterator[Evaluation]:
    """Evaluates each newest checkpoint once, until the trainer has ended."""
    step = None
    while True:
        # Asked first, so that the next round sees a last checkpoint saved after the look below.
        is_training = run.directory.is_locked()
        path = checkpoint.latest(run.directory.path)
        if path and checkpoint.step_of(path) != step:
            evaluation = run.use_checkpoint(evaluator.evaluate)
            step = evaluation.step
            yield evaluation
        elif is_training:
            time.sleep(pause_secs)
        else:
            break
    if step is None:
        run.checkpoint()  # raises
