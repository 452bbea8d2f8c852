"""Evaluating the checkpoints of a run while it trains."""

from tower_train.config import Config
from tower_train.graph import devices
from tower_train.inference import evaluator
from tower_train.run import report
from tower_train.run_dir import best, directory
from tower_train.workload import DataRequest, Examples, Workload


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
        self.best = best.Best(
            run_dir, keep=config.keep_best, patience_epochs=config.stop_after_no_gain_epochs,
            every_steps=config.eval_every_steps, num_examples=examples.num_examples, global_batch=config.global_batch,
        )  # fmt: skip

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
        evaluator.write_curves(self._writer, self.last)
        lines = report.evaluation_lines(self.last)
        if "train" in self._evaluators:
            self.last_on_training_examples = self._evaluators["train"].evaluate(path)
            evaluator.write_curves(self._writer, self.last_on_training_examples, prefix="train ")
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
            self._evaluators[name] = evaluator.Evaluator(
                self._workload, examples, config.tower_batch, config.dtype, config.moving_average_decay, self._placed
            )
        self._writer = evaluator.open_curves(self._run_dir)

    def close(self) -> None:
        for opened in self._evaluators.values():
            opened.close()
        if self._writer:
            self._writer.close()
