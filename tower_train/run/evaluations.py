"""Evaluations during training."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.inference import report
from tower_train.inference.evaluator import Evaluation, Evaluator
from tower_train.inference.saved_run import CURVES, write_curves
from tower_train.run_dir import directory, logs
from tower_train.run_dir.best import Best
from tower_train.workload import Examples

TEST, TRAIN = "evaluation", "train_evaluation"  # names in result.json


class Evaluations:
    """Evaluates checkpoints while their run trains; loads examples and builds graphs on first use.

    Args:
      run_dir: the run's.
      every_steps: steps between evaluations; 0 for none.
      end: the last step, to evaluate after it too; else None.
      evaluators: makes the evaluators, by the names of their evaluations in result.json.
      best: compares the evaluations.

    Attributes:
      best: as given.
      examples: the test examples, once they are loaded; else None.
      pending: path of a checkpoint to evaluate before the first step, see `begin`; else None.
      last: the last evaluations, by their names in result.json.
    """

    def __init__(
        self, run_dir: directory.RunDirectory, every_steps: int, end: int | None,
        evaluators: Callable[[], dict[str, Evaluator]], best: Best,
    ):  # fmt: skip
        self._run_dir, self._every_steps, self._end = run_dir, every_steps, end
        self._make_evaluators, self.best = evaluators, best
        self._evaluators: dict[str, Evaluator] = {}
        self.pending: str | None = None
        self.last: dict[str, Evaluation] = {}
        self._writer = None
        self._has_warned = False

    @property
    def examples(self) -> Examples | None:
        return self._evaluators[TEST].examples if self._evaluators else None

    def is_due(self, step: int) -> bool:
        return step == self._end or (self._every_steps > 0 and step % self._every_steps == 0)

    def try_out(self, step: int, last_step: int, trained: Sequence[tf.Variable]) -> list[str]:
        """Tries out the coming evaluations; returns lines about them.

        Args:
          step: the last one done.
          last_step: of the run.
          trained: the variables of the training.

        Raises:
          UserError: there are no test examples, an evaluation of a batch of them fails, or none could be the best.
        """
        every = self._every_steps
        are_due = self._end is not None and step < last_step or every and last_step // every > step // every
        if not (are_due or self.best.is_used):
            return []
        self._open()
        evaluator = self._evaluators[TEST]
        evaluator.try_out(trained)
        lines = self.best.compare_by(*evaluator.first_metric)
        names = evaluator.examples.class_names
        if names and not evaluator.has_confusion:
            lines.append(
                f"*** {evaluator.examples.name} has {len(names)} classes, and the network does not give one output for "
                "each: there is no confusion matrix, and an export has no probabilities."
            )
        return lines

    def begin(self, step: int, path: str | None) -> None:
        """Begins at a step and its checkpoint, which is pending if the run was killed before its due evaluation."""
        is_killed = self.best.begin(step) and step % self._every_steps == 0
        done = self._run_dir.read(directory.RESULT).get(TEST, {}).get("step")
        if is_killed or (self._end is not None and step >= self._end and done != step):
            self.pending = path

    def evaluate(self, path: str) -> list[str]:
        """Evaluates a checkpoint, writes the curves and keeps the results as `last`; returns lines about them."""
        self._open()
        if not self._writer:
            self._writer = logs.EventWriter(self._run_dir.path / CURVES)
        self.last = {name: evaluator.evaluate(path) for name, evaluator in self._evaluators.items()}
        evaluation, on_training = self.last[TEST], self.last.get(TRAIN)
        write_curves(self._writer, evaluation)
        lines = report.evaluation_lines(evaluation)
        if on_training:
            write_curves(self._writer, on_training, prefix="train ")
            lines += report.comparison_lines(on_training, evaluation)
            if not self._has_warned and (warning := report.overfitting(on_training, evaluation)):
                self._has_warned = True
                lines.append(warning)
        return lines + self.best.note(evaluation, path)

    def _open(self) -> None:
        self._evaluators = self._evaluators or self._make_evaluators()

    def results(self) -> dict:
        return {name: evaluation.as_dict() for name, evaluation in self.last.items()}

    def close(self) -> None:
        for resource in [*self._evaluators.values(), self._writer]:
            if resource:
                resource.close()
