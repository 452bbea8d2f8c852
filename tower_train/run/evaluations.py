"""Evaluations during training."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train.examples import TEST, TRAIN, VALIDATION, DataRequest
from tower_train.inference import report
from tower_train.inference.evaluator import Evaluation, Evaluator
from tower_train.inference.saved_run import RESULT_NAMES, curves_folder, write_curves
from tower_train.run.plan import Plan
from tower_train.run_dir import checkpoint, directory, logs
from tower_train.run_dir.best import Best
from tower_train.run_dir.json_files import OF_EVALUATION, is_evaluation

TRAINING_EXAMPLES = 1000  # that each evaluation looks at: enough to see by 3 % that a network learns them by heart


class Evaluations:
    """Evaluates checkpoints while their run trains; loads examples and builds graphs on first use.

    The best checkpoint and early stopping are chosen on validation examples, on the test examples only without those.
    """

    def __init__(self, plan: Plan):
        self._plan, self._run_dir, self._config, self._trained_on = plan, plan.run_dir, plan.config, plan.examples
        self.best = Best(plan.run_dir, plan.config, plan.examples.num_examples, plan.steps_done)
        self._evaluators: dict[str, Evaluator] = {}  # by split
        self._split = TEST  # on which checkpoints are chosen
        self.pending: str | None = None  # path of a checkpoint to evaluate before the first step
        self.last: dict[str, Evaluation] = {}  # by split
        self._writers: dict[str, logs.EventWriter] = {}

    def is_due(self, step: int) -> bool:
        every = self._config.eval_every_steps
        return (self._config.eval_at_end and step == self._plan.last_step) or (every > 0 and step % every == 0)

    def begin(self, trained: Sequence[tf.Variable]) -> list[str]:
        """Tries out the coming evaluations, and finds one that the last start left; returns lines about them.

        Args:
          trained: the variables of the training.

        Raises:
          UserError: there are no examples to evaluate, a batch fails, or the metric to choose by has no direction.
        """
        step, every, last_step = self._plan.steps_done, self._config.eval_every_steps, self._plan.last_step
        are_due = self._config.eval_at_end and step < last_step or every and last_step // every > step // every
        lines = self._try_out(trained) if are_due or self.best.is_used else []
        self._find_pending(step)
        return lines

    def _find_pending(self, step: int) -> None:
        """Finds the newest checkpoint if it is due and was not evaluated, or only until a failure or a signal."""
        records, result = self._run_dir.records().values(), self._run_dir.read(directory.RESULT)
        every, recorded = self._config.eval_every_steps, [each["step"] for each in records if is_evaluation(each)]
        is_new = bool(every) and step % every == 0 and (step not in recorded or self.best.is_news)
        done = [result.get(RESULT_NAMES[split], {}).get("step") for split in (VALIDATION, TEST)]
        if is_new or (self._config.eval_at_end and step >= self._plan.last_step and step not in done):
            self.pending = checkpoint.latest(self._run_dir.path)

    def _try_out(self, trained: Sequence[tf.Variable]) -> list[str]:
        self._open()
        evaluator = self._evaluators[self._split]
        for split, each in self._evaluators.items():
            each.examples.check_same_classes(self._trained_on.name, self._trained_on.class_names)
            if split != TRAIN:  # a network that trains on these can evaluate them
                each.try_out(trained)
        lines = self.best.compare_by(*evaluator.first_metric)
        if self.best.is_used and self._split == TEST:
            lines.append(
                "*** The best checkpoint is chosen on the test examples, which flatters it. --validation_fraction=0.1 "
                "sets a tenth of the training examples aside to choose on."
            )
        # once, and not what the training has said already
        notices = dict.fromkeys(each.examples.notice for each in self._evaluators.values())
        return lines + [f"*** {notice}" for notice in notices if notice not in (None, self._trained_on.notice)]

    def evaluate(self, path: str, after_batch: Callable[[], None]) -> list[str]:
        """Evaluates a checkpoint, writes the curves and keeps the results; returns lines about them. after_batch: as of
        `Evaluator.evaluate`."""
        self._open()
        # test examples are looked at once, unless checkpoints are chosen on them
        is_last = checkpoint.saved_step(path) >= self._plan.last_step
        due = [split for split in self._evaluators if split in (self._split, TRAIN) or is_last]
        self.last = {split: self._evaluators[split].evaluate(path, after_batch) for split in due}
        lines = []
        for split in [split for split in due if split != TRAIN]:
            self._write_curves(split, split, "")
            lines += report.evaluation_lines(self.last[split])
        evaluation, on_training = self.last[self._split], self.last[TRAIN]
        self._write_curves(TRAIN, self._split, "train ")
        lines += report.comparison_lines(on_training, evaluation)
        return lines + self.best.note(evaluation, path)

    def closing_lines(self, step: int, training_secs: float | None) -> list[str]:
        """Returns lines about the best weights and the last, these on the test examples if possible."""
        split = TEST if TEST in self.last else self._split
        lines, last = self.best.closing_lines(self._split), self.last.get(split)
        if last and last.step == step:
            name, metric = next(iter(last.metrics.items()))
            trained = f", after {training_secs:.1f} s of training" if training_secs else ""
            lines.append(f"Result:   {report.with_interval(name, metric)} on {split} examples at step {step}{trained}")
        return lines

    @property
    def record(self) -> dict[str, float | None]:
        """The last evaluation's record in metrics.jsonl, by the names that Keras' History has."""
        evaluation = self.last[self._split]
        examples = evaluation.step * self._config.global_batch
        record = {"step": evaluation.step, "epoch": examples / self._trained_on.num_examples}
        for prefix, split in ((OF_EVALUATION, self._split), ("train_", TRAIN)):
            for name, metric in self.last[split].metrics.items():
                record[prefix + name] = metric.mean if math.isfinite(metric.mean) else None  # JSON has no NaN
        return record

    def _write_curves(self, split: str, beside: str, prefix: str) -> None:
        """Adds a point to the curves of a split's evaluation, in the event files of the evaluations of a split."""
        if beside not in self._writers:
            self._writers[beside] = logs.EventWriter(self._run_dir.path, curves_folder(beside))
        write_curves(self._writers[beside], self.last[split], prefix)

    def _open(self) -> None:
        """Makes evaluators, each with its graph: on the examples to choose on, on the test examples at the end, and on
        some training examples."""
        if self._evaluators:
            return
        config, trained_on, workload = self._config, self._trained_on, self._plan.workload
        request = DataRequest(TEST, trained_on.dataset, config.data_dir, config.seed, config.validation_fraction)
        self._split, examples = workload.first_split(request, (VALIDATION, TEST))
        evaluated = {self._split: examples, TRAIN: trained_on.sample(TRAINING_EXAMPLES)}
        if config.eval_at_end and TEST not in evaluated and (test_examples := workload.split(request)):
            evaluated[TEST] = test_examples
        # on the towers' devices, as no step runs meanwhile
        arguments = config.batch_size, config.dtype, config.ema, self._plan.devices, self._plan.step.is_compiled
        self._evaluators = {split: Evaluator(workload, each, *arguments) for split, each in evaluated.items()}

    def close(self) -> None:
        for resource in [*self._evaluators.values(), *self._writers.values()]:
            resource.close()
