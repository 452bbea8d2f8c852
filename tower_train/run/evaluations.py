"""Evaluations during training."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train.config import Config
from tower_train.graph import devices
from tower_train.inference import report
from tower_train.inference.evaluator import Evaluation, Evaluator
from tower_train.inference.saved_run import CURVES, write_curves
from tower_train.run_dir import directory, logs
from tower_train.run_dir.best import Best
from tower_train.workload import DataRequest, Examples, Workload

TEST, TRAIN = "evaluation", "train_evaluation"  # names in result.json
TRAINING_EXAMPLES = 1000  # that each evaluation looks at: enough to see by 3 % that a network learns them by heart


class Evaluations:
    """Evaluates checkpoints while their run trains; loads examples and builds graphs on first use.

    Args:
      run_dir, config, workload: of the run.
      examples: those that it trains on.

    Attributes:
      best: compares the evaluations.
      pending: path of a checkpoint to evaluate before the first step; else None.
      last: the last evaluations, by their names in result.json.
    """

    def __init__(self, run_dir: directory.RunDirectory, config: Config, workload: Workload, examples: Examples):
        self._run_dir, self._config, self._workload, self._trained_on = run_dir, config, workload, examples
        self._last_step = config.last_step(examples.num_examples)
        patience = config.early_stopping_patience_epochs * examples.num_examples
        self.best = Best(run_dir, config.keep_best, patience, config.global_batch)
        self._evaluators: dict[str, Evaluator] = {}
        self.pending: str | None = None
        self.last: dict[str, Evaluation] = {}
        self._writer = None
        self._has_warned = False

    def is_due(self, step: int) -> bool:
        every = self._config.eval_every_steps
        return (self._config.eval_at_end and step == self._last_step) or (every > 0 and step % every == 0)

    def begin(self, step: int, path: str | None, trained: Sequence[tf.Variable]) -> list[str]:
        """Tries out the coming evaluations; returns lines about them.

        Args:
          step: the last one done.
          path: of its checkpoint, which is pending if the run was killed before its due evaluation.
          trained: the variables of the training.

        Raises:
          UserError: there are no test examples, an evaluation of a batch of them fails, or none could be the best.
        """
        every, at_end, last_step = self._config.eval_every_steps, self._config.eval_at_end, self._last_step
        are_due = at_end and step < last_step or every and last_step // every > step // every
        lines = self._try_out(trained) if are_due or self.best.is_used else []
        is_killed = self.best.begin(step) and step % every == 0
        done = self._run_dir.read(directory.RESULT).get(TEST, {}).get("step")
        if is_killed or (at_end and step >= last_step and done != step):
            self.pending = path
        return lines

    def _try_out(self, trained: Sequence[tf.Variable]) -> list[str]:
        self._open()
        evaluator = self._evaluators[TEST]
        evaluator.try_out(trained)
        examples, lines = evaluator.examples, self.best.compare_by(*evaluator.first_metric)
        if examples.class_names and not evaluator.has_confusion:
            lines.append(
                f"*** {examples.name} has {len(examples.class_names)} classes, and the network does not give one "
                "output for each: there is no confusion matrix, and an export has no probabilities."
            )
        if examples.notice and examples.notice != self._trained_on.notice:
            lines.append(f"*** {examples.notice}")
        return lines

    def evaluate(self, path: str) -> list[str]:
        """Evaluates a checkpoint, writes the curves and keeps the results as `last`; returns lines about them."""
        self._open()
        if not self._writer:
            self._writer = logs.EventWriter(self._run_dir.path / CURVES)
        self.last = {name: evaluator.evaluate(path) for name, evaluator in self._evaluators.items()}
        evaluation, on_training = self.last[TEST], self.last[TRAIN]
        write_curves(self._writer, evaluation)
        lines = report.evaluation_lines(evaluation)
        write_curves(self._writer, on_training, prefix="train ")
        lines += report.comparison_lines(on_training, evaluation)
        if not self._has_warned and (warning := report.overfitting(on_training, evaluation)):
            self._has_warned = True
            lines.append(warning)
        return lines + self.best.note(evaluation, path)

    def _open(self) -> None:
        """Makes evaluators on the test examples and on some training examples; each builds a graph."""
        if self._evaluators:
            return
        config, trained_on = self._config, self._trained_on
        request = DataRequest("test", trained_on.dataset, config.data_dir, config.seed)
        evaluated = {TEST: self._workload.examples(request), TRAIN: trained_on.sample(TRAINING_EXAMPLES)}
        about = config.tower_batch, config.dtype, config.moving_average_decay, devices.place(config)
        self._evaluators = {name: Evaluator(self._workload, each, *about) for name, each in evaluated.items()}

    def close(self) -> None:
        for resource in [*self._evaluators.values(), self._writer]:
            if resource:
                resource.close()
