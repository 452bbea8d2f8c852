"""Evaluation: every example exactly once, on the weights of a checkpoint."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.config import EvaluateOptions
from tower_train.graph import devices
from tower_train.graph.evaluation import evaluation_graph
from tower_train.inference import saved_run
from tower_train.inference.confusion import Confused, Confusions
from tower_train.run_dir import checkpoint, directory, events, input_failures
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
_Z = statistics.NormalDist().inv_cdf(0.975)  # the two-sided 95 % quantile


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's mean over all examples, and the bounds of its 95 % interval; None if it is no proportion."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
      step: the checkpoint's.
      data: the name of the examples.
      num_examples: how many were counted, each once.
      weights: 'moving averages' or 'raw weights'.
      metrics: by name.
      confusion: [true class][predicted class], counts; None if labels are not classes, and of more than 200 classes.
      class_names: of its rows and columns.
      most_confused: the most frequent mistakes where classes are too many for a matrix, the most frequent one first.
      seconds: the time it took.
      several_views: whether outputs are means over several views of each example.
    """

    step: int
    data: str
    num_examples: int
    weights: str
    metrics: dict[str, Metric]
    confusion: list[list[int]] | None
    class_names: tuple[str, ...]
    seconds: float
    several_views: bool = False
    most_confused: tuple[Confused, ...] = ()

    def as_dict(self) -> dict:
        """The evaluation in result.json."""
        return dataclasses.asdict(self)


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927), which holds near 0 and 1 too, unlike the normal one."""
    share = successes / trials
    scale = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    return max(0.0, center - half), min(1.0, center + half)


class Evaluator:
    """Evaluates checkpoints of one run, with one graph and one session for all of them.

    The result does not depend on tower_batch. With a moving_average_decay of 0 the weights themselves are evaluated.
    """

    def __init__(
        self, workload: Workload, examples: Examples, tower_batch: int, dtype: str, moving_average_decay: float,
        placed: devices.Devices,
    ):  # fmt: skip
        self._examples, self._several_views = examples, workload.views is not None
        self._weights = "moving averages" if moving_average_decay else "raw weights"
        self._built = evaluation_graph(workload, examples, tower_batch, dtype, moving_average_decay, placed)
        with self._built.graph.as_default():
            self._saver = v1.train.Saver(self._built.restored)
            self._prepare = [v1.local_variables_initializer(), v1.tables_initializer(), self._built.stream_initializer]
        self._session = v1.Session(graph=self._built.graph, config=placed.session_config)

    def evaluate(self, path: str) -> Evaluation:
        """Restores a checkpoint and counts every example once.

        Raises:
          RunError: the checkpoint cannot be restored into this network.
          DataError: the examples cannot be read, or are fewer or more than they should be.
        """
        start = time.perf_counter()
        checkpoint.restore(self._saver, self._session, path)
        sums, count, confusions = self._count()
        if count != self._examples.num_examples:
            raise errors.DataError(
                f"{self._examples.name}: gave {count} examples or more, where there should be "
                f"{self._examples.num_examples}. Mend num_examples= or the dataset."
            )
        matrix = confusions.matrix()
        return Evaluation(
            step=checkpoint.step_of(path),
            data=self._examples.name,
            num_examples=count,
            weights=self._weights,
            metrics={name: _metric(*moments, count) for name, moments in sums.items()},
            confusion=matrix,
            class_names=self._examples.class_names if matrix else (),
            seconds=time.perf_counter() - start,
            several_views=self._several_views,
            most_confused=() if matrix else confusions.most_frequent(),
        )

    def _count(self) -> tuple[dict, int, Confusions]:
        """{metric: (sum, whether only zeros and ones)}, the number of examples, the confusions of classes."""
        built, confusions = self._built, Confusions(self._examples.class_names)
        fetches = {"metrics": built.metrics}
        if self._examples.class_names:
            fetches |= {"labels": built.labels, "predictions": built.predictions}
        sums, count = {name: [0.0, True] for name in built.metrics}, 0
        self._session.run(self._prepare)
        # A dataset in an order of its own may hold fewer examples than it should, or more.
        for _ in range(built.num_steps + bool(self._examples.elements)):
            try:
                with input_failures.named(self._examples.name, may_end=True):
                    values = self._session.run(fetches)
            except tf.errors.OutOfRangeError:
                break
            for name, per_example in values["metrics"].items():
                sums[name][0] += float(per_example.sum(dtype=np.float64))
                sums[name][1] &= bool(np.isin(per_example, (0, 1)).all())
            count += len(per_example)
            if self._examples.class_names:
                confusions.add(values["labels"], values["predictions"])
        return sums, count, confusions

    def close(self) -> None:
        self._session.close()


def _metric(total: float, is_proportion: bool, count: int) -> Metric:
    return Metric(total / count, *(wilson_interval(total, count) if is_proportion else ()))


def evaluate_run(options: EvaluateOptions, workload: Workload | None = None) -> Iterator[Evaluation]:
    """Evaluates the newest checkpoint of a run, or with options.watch each new one until the run's trainer has ended.

    Writes each evaluation to the run's result.json and event files, or says on standard error that it cannot.

    Args:
      options: which run, and how.
      workload: the run's; None imports it by the path in options or in run.json.

    Yields:
      One Evaluation a checkpoint.

    Raises:
      RunError: no run there, no checkpoint, one of another network, or a damaged result.json.
    """
    run = saved_run.read(options, workload)
    run.directory.read(directory.RESULT)
    if not options.watch:
        run.checkpoint()  # raises if there is none, before the graph is built
    evaluator = Evaluator(
        run.workload, run.examples, options.batch_size, run.dtype, run.moving_average_decay, devices.place(options)
    )
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
    """Writes an evaluation to result.json; says so if that cannot be, as on a run that may only be read."""
    try:
        run_dir.update(directory.RESULT, {"evaluation": evaluation.as_dict()})
    except errors.RunError as error:
        console.notice(console.one_line(f"the evaluation of step {evaluation.step} is shown, not kept: {error}"))
        return False
    return True


def open_curves(run_dir: directory.RunDirectory) -> events.EventWriter:
    """The event files of a run's evaluations, whose curves TensorBoard draws beside the training curves."""
    return events.EventWriter(run_dir.path / "eval")


def write_curves(writer: events.EventWriter, evaluation: Evaluation, prefix: str = "") -> None:
    """Adds a point to each metric's curve; prefix: of the curves' names."""
    means = {prefix + name: metric.mean for name, metric in evaluation.metrics.items()}
    events.add_scalars(writer, means, evaluation.step)


def _watched(run: saved_run.SavedRun, evaluator: Evaluator, pause_secs: float) -> Iterator[Evaluation]:
    """Evaluates each newest checkpoint once, until the trainer has ended."""
    step = None
    while True:
        # Asked first: the next round sees a checkpoint that is saved after the look below, also if it is the last.
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
        run.checkpoint()  # raises, as there is none
