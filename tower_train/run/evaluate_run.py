"""Evaluating the checkpoints of a run, after training, beside it or during it."""

import contextlib
import time
from collections.abc import Iterator

from tower_train import errors
from tower_train.config import Config, EvaluateOptions, RunOptions
from tower_train.graph import devices
from tower_train.run import checkpoint, directory, evaluation, events
from tower_train.workload import DataRequest, Examples, Workload, load


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
    workload, examples, config = read_run(options, workload)
    paths = _watched(run_dir, options.watch_secs) if options.watch else newest(run_dir)
    evaluator = evaluation.Evaluator(
        workload, examples, options.batch_size, config["dtype"], 0 if options.raw else config["moving_average_decay"],
        devices.place(options),
    )  # fmt: skip
    with contextlib.closing(evaluator), contextlib.closing(_curves(run_dir)) as writer:
        for path in paths:
            found = evaluator.evaluate(path)
            run_dir.update(directory.RESULT, {"evaluation": found.as_dict()})
            _write_events(writer, found)
            yield found


def read_run(options: RunOptions, workload: Workload | None = None) -> tuple[Workload, Examples, dict]:
    """Finds out what a run trained.

    Args:
      options: which run, and where its workload and data are if not where they were.
      workload: the run's; None imports it by the path in options or in run.json.

    Returns:
      The workload under the run's options, its test examples, and the config of run.json.

    Raises:
      RunError: no run there, or one of another workload.
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
    config = run_json["config"]
    data_dir, dataset = options.data_dir or config["data_dir"], options.dataset or run_json["dataset"]
    return workload, workload.examples(DataRequest("test", dataset, data_dir, config["seed"])), config


def newest(run_dir: directory.RunDirectory) -> list[str]:
    """The path of the newest checkpoint, as a list of one.

    Raises:
      RunError: there is none.
    """
    path = checkpoint.latest(run_dir.path)
    if not path:
        raise errors.RunError(
            f"--train_dir={run_dir.path} holds no checkpoint yet. Use --watch while it trains to wait for one."
        )
    return [path]


def _watched(run_dir: directory.RunDirectory, secs: float) -> Iterator[str]:
    """Each newest checkpoint once, until the trainer has ended."""
    seen = None
    while True:
        # Asked before looking: what is saved after the look is seen in the next round, also when the trainer ends then.
        training = run_dir.is_locked()
        path = checkpoint.latest(run_dir.path)
        if path != seen:
            seen = path
            yield path
        elif training:
            time.sleep(secs)
        else:
            break
    if not seen:
        newest(run_dir)


class DuringTraining:
    """Evaluates checkpoints while their run trains; loads the examples and builds the graph when first asked to.

    Args:
      workload, config, placed: the run's.
      dataset: the --dataset that the run trains on.
      run_dir: where it trains.
    """

    def __init__(
        self, workload: Workload, config: Config, placed: devices.Devices, dataset: str, run_dir: directory.RunDirectory
    ):
        self._workload, self._config, self._placed = workload, config, placed
        self._request = DataRequest("test", dataset, config.data_dir, config.seed)
        self._run_dir = run_dir
        self._evaluator = self._writer = self.last = None

    def evaluate(self, path: str) -> evaluation.Evaluation:
        """Evaluates one checkpoint, writes the events, and keeps the result as `last`."""
        if not self._evaluator:
            config, examples = self._config, self._workload.examples(self._request)
            self._evaluator = evaluation.Evaluator(
                self._workload, examples, config.batch_size, config.dtype, config.moving_average_decay, self._placed
            )
            self._writer = _curves(self._run_dir)
        self.last = self._evaluator.evaluate(path)
        _write_events(self._writer, self.last)
        return self.last

    def close(self) -> None:
        if self._evaluator:
            self._evaluator.close()
            self._writer.close()


def _curves(run_dir: directory.RunDirectory):
    """Where evaluations of a run are written for TensorBoard: curves beside the training curves."""
    return events.open_writer(run_dir.path / "eval")


def _write_events(writer, found: evaluation.Evaluation) -> None:
    """One point of each metric's curve."""
    events.add_scalars(writer, {name: metric.mean for name, metric in found.metrics.items()}, found.step)
    writer.flush()
