"""Evaluations during training: when they are due, what they tell."""

import dataclasses
from collections.abc import Callable

from tower_train.inference import report
from tower_train.inference.evaluator import Evaluator, open_curves, write_curves
from tower_train.run_dir import directory
from tower_train.run_dir.best import Best


@dataclasses.dataclass(frozen=True)
class Plan:
    """When a run is evaluated: every so many steps, 0 for never, and at its last step."""

    every_steps: int
    at_end: bool
    last_step: int

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return bool(self.every_steps and step % self.every_steps == 0) or (self.at_end and step == self.last_step)


class Evaluations:
    """Evaluates checkpoints while their run trains; loads the examples and builds the graphs when first asked to.

    Args:
      plan: when.
      evaluators: makes {"test": evaluator}, and "train" for one on training examples.
      best: compares the evaluations.
      run_dir: where the run trains.

    Attributes:
      best: as given.
      pending: path of a checkpoint to evaluate before the first step, see `begin`; else None.
      last: the last evaluation on the test examples.
      last_on_training_examples: the last one on training examples.
    """

    def __init__(self, plan: Plan, evaluators: Callable[[], dict[str, Evaluator]], best: Best,
                 run_dir: directory.RunDirectory):  # fmt: skip
        self._plan, self._make_evaluators, self._run_dir, self.best = plan, evaluators, run_dir, best
        self._evaluators: dict[str, Evaluator] = {}
        self.pending: str | None = None
        self._writer = self.last = self.last_on_training_examples = None
        self._has_warned = False
        self.is_due = plan.is_due

    def begin(self, step: int, path: str | None) -> None:
        """Begins at a step, and its checkpoint, to go on from. It is pending if its evaluation was due when the run was
        killed and is still to be done."""
        done = self._run_dir.read(directory.RESULT).get("evaluation", {}).get("step")
        missing = self._plan.at_end and step >= self._plan.last_step and done != step
        if self.best.begin(step) or missing:
            self.pending = path

    def evaluate(self, path: str) -> list[str]:
        """Evaluates one checkpoint on the test examples and on some training examples, writes the curves, keeps the
        results as `last` and `last_on_training_examples`; returns lines that tell of them."""
        if not self._evaluators:
            self._evaluators, self._writer = self._make_evaluators(), open_curves(self._run_dir)
        self.last = self._evaluators["test"].evaluate(path)
        write_curves(self._writer, self.last)
        lines = report.evaluation_lines(self.last)
        if "train" in self._evaluators:
            self.last_on_training_examples = self._evaluators["train"].evaluate(path)
            write_curves(self._writer, self.last_on_training_examples, prefix="train ")
            lines += report.comparison_lines(self.last_on_training_examples, self.last)
            if not self._has_warned and (warning := report.overfitting(self.last_on_training_examples, self.last)):
                self._has_warned = True
                lines.append(warning)
        return lines + self.best.note(self.last, path)

    def results(self) -> dict:
        """For result.json; empty if nothing was evaluated."""
        named = {"evaluation": self.last, "train_evaluation": self.last_on_training_examples}
        return {name: evaluation.as_dict() for name, evaluation in named.items() if evaluation}

    def close(self) -> None:
        for resource in [*self._evaluators.values(), self._writer]:
            if resource:
                resource.close()
