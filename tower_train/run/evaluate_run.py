"""Evaluating the checkpoints of a run, after training, beside it or during it."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config, EvaluateOptions
from tower_train.graph import devices
from tower_train.run import checkpoint, directory, evaluation
from tower_train.workload import DataRequest, Workload, load

v1 = tf.compat.v1


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
    run_json = run_dir.read(directory.RUN)
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
    paths = _watched(run_dir, options.watch_secs) if options.watch else _newest(run_dir)
    config = run_json["config"]
    data_dir, dataset = options.data_dir or config["data_dir"], options.dataset or run_json["dataset"]
    evaluator = evaluation.Evaluator(
        workload, workload.examples(DataRequest("test", dataset, data_dir, config["seed"])), options.batch_size,
        config["dtype"], 0 if options.raw else config["moving_average_decay"], devices.place(options),
    )  # fmt: skip
    with contextlib.closing(evaluator), contextlib.closing(_event_writer(run_dir)) as writer:
        for path in paths:
            found = evaluator.evaluate(path)
            run_dir.update(directory.RESULT, {"evaluation": found.as_dict()})
            _write_events(writer, found)
            yield found


def _newest(run_dir: directory.RunDirectory) -> list[str]:
    path = checkpoint.latest(run_dir.path)
    if not path:
        raise errors.RunError(f"--train_dir={run_dir.path} holds no checkpoint yet. Wait for one with --watch.")
    return [path]


def _watched(run_dir: directory.RunDirectory, secs: float) -> Iterator[str]:
    return tf.train.checkpoints_iterator(
        str(run_dir.path), min_interval_secs=secs, timeout=secs, timeout_fn=lambda: not run_dir.is_locked()
    )


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
            self._writer = _event_writer(self._run_dir)
        self.last = self._evaluator.evaluate(path)
        _write_events(self._writer, self.last)
        return self.last

    def close(self) -> None:
        if self._evaluator:
            self._evaluator.close()
            self._writer.close()


def _event_writer(run_dir: directory.RunDirectory) -> v1.summary.FileWriter:
    """Where evaluations of a run are written for TensorBoard: a curve beside the training curves."""
    with tf.Graph().as_default():
        return v1.summary.FileWriter(str(run_dir.path / "eval"))


def _write_events(writer: v1.summary.FileWriter, found: evaluation.Evaluation) -> None:
    """One point of each metric's curve."""
    values = [v1.Summary.Value(tag=name, simple_value=metric.mean) for name, metric in found.metrics.items()]
    writer.add_summary(v1.Summary(value=values), found.step)
    writer.flush()
