"""Evaluating the checkpoints of a run, after training, beside it or during it."""

import contextlib
import time
from collections.abc import Iterator

from tower_train.config import Config, EvaluateOptions
from tower_train.graph import devices
from tower_train.inference import evaluation, trained
from tower_train.run import report
from tower_train.run_dir import best, checkpoint, directory, events
from tower_train.workload import DataRequest, Examples, Workload


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
    with contextlib.closing(evaluator), contextlib.closing(_curves(run_dir)) as writer:
        if options.watch:
            evaluations = _watched(run_dir, options, evaluator.evaluate)
        else:
            evaluations = [trained.use_checkpoint(run_dir, options, evaluator.evaluate)]
        for found in evaluations:
            run_dir.update(directory.RESULT, {"evaluation": found.as_dict()})
            _write_events(writer, found)
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


class DuringTraining:
    """Evaluates checkpoints while their run trains; loads the examples and builds the graph when first asked to.

    Args:
      workload, config, placed: the run's.
      examples: what it trains on.
      run_dir: where it trains.
    """

    def __init__(
        self, workload: Workload, config: Config, placed: devices.Devices, examples: Examples,
        run_dir: directory.RunDirectory,
    ):  # fmt: skip
        self._workload, self._config, self._placed = workload, config, placed
        self._examples, self._run_dir = examples, run_dir
        self._request = DataRequest("test", examples.dataset, config.data_dir, config.seed)
        self._evaluators = {}
        self._writer = self.last = self.last_on_training_examples = None
        self._has_warned = False
        self.best = best.Best(run_dir, config, examples.num_examples)

    def begin(self, step: int, last_step: int) -> bool:
        """Begins at a step to go on from, up to a last one; returns whether its evaluation was due when the run
        was killed and is still to be done."""
        done = self._run_dir.read(directory.RESULT).get("evaluation", {}).get("step")
        missing = self._config.eval_at_end and step >= last_step and done != step
        return self.best.begin(step) or bool(missing)

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether there is an evaluation after a step."""
        every = self._config.eval_every_steps
        return bool(every and step % every == 0) or (self._config.eval_at_end and step == last_step)

    def evaluate(self, path: str) -> list[str]:
        """Evaluates one checkpoint on the test examples and on some training examples, writes the events, keeps the
        results as `last` and `last_on_training_examples`; returns lines that tell of them."""
        if not self._evaluators:
            self._open()
        self.last = self._evaluators["test"].evaluate(path)
        _write_events(self._writer, self.last)
        lines = report.evaluation_lines(self.last)
        if "train" in self._evaluators:
            self.last_on_training_examples = self._evaluators["train"].evaluate(path)
            _write_events(self._writer, self.last_on_training_examples, prefix="train ")
            lines += report.comparison_lines(self.last_on_training_examples, self.last)
            if not self._has_warned and (warning := report.overfitting(self.last_on_training_examples, self.last)):
                self._has_warned = True
                lines.append(warning)
        return lines + self.best.note(self.last, path)

    def results(self) -> dict:
        """For result.json; empty where nothing was evaluated."""
        named = {"evaluation": self.last, "train_evaluation": self.last_on_training_examples}
        return {name: found.as_dict() for name, found in named.items() if found}

    def _open(self) -> None:
        config = self._config
        chosen_examples = {"test": self._workload.examples(self._request)}
        if config.train_eval_examples:
            chosen_examples["train"] = self._examples.sample(config.train_eval_examples)
        for name, examples in chosen_examples.items():
            self._evaluators[name] = evaluation.Evaluator(
                self._workload, examples, config.tower_batch, config.dtype, config.moving_average_decay, self._placed
            )
        self._writer = _curves(self._run_dir)

    def close(self) -> None:
        for evaluator in self._evaluators.values():
            evaluator.close()
        if self._writer:
            self._writer.close()


def _curves(run_dir: directory.RunDirectory):
    """Where evaluations of a run are written for TensorBoard: curves beside the training curves."""
    return events.open_writer(run_dir.path / "eval")


def _write_events(writer, found: evaluation.Evaluation, prefix: str = "") -> None:
    """One point of each metric's curve; prefix: of the curves' names."""
    events.add_scalars(writer, {prefix + name: metric.mean for name, metric in found.metrics.items()}, found.step)
    writer.flush()
