"""Evaluation: every example exactly once, on the weights of a checkpoint."""

import dataclasses
import math
import time

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.graph.devices import Devices
from tower_train.graph.evaluation import evaluation_graph
from tower_train.run import input_stream
from tower_train.run_dir import checkpoint
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's mean over all examples. low and high bound its 95 % interval; None unless it is a proportion."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      step: the checkpoint's.
      data: which examples.
      num_examples: how many were counted, each once.
      weights: 'moving averages' or 'raw weights'.
      metrics: by name.
      confusion: [true class][predicted class], counts; None where labels are not classes.
      class_names: of its rows and columns.
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

    def as_dict(self) -> dict:
        """For result.json."""
        return dataclasses.asdict(self)


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927; right also near 0 and 1, where the normal one is not)."""
    share = successes / trials
    scale = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    return max(0.0, center - half), min(1.0, center + half)


class Evaluator:
    """Evaluates checkpoints of one run, with one graph and one session for all of them.

    Args:
      workload, examples, devices: what, on what, where.
      tower_batch: examples per tower and step; the result does not depend on it.
      dtype: the run's.
      moving_average_decay: the run's; 0 evaluates the weights themselves.
    """

    def __init__(
        self, workload: Workload, examples: Examples, tower_batch: int, dtype: str, moving_average_decay: float,
        devices: Devices,
    ):  # fmt: skip
        self._examples, self._several_views = examples, workload.views is not None
        self._weights = "moving averages" if moving_average_decay else "raw weights"
        self._built = evaluation_graph(workload, examples, tower_batch, dtype, moving_average_decay, devices)
        with self._built.graph.as_default():
            self._saver = v1.train.Saver(self._built.restored)
            self._prepare = [v1.local_variables_initializer(), v1.tables_initializer(), self._built.stream_initializer]
        self._session = v1.Session(graph=self._built.graph, config=devices.session_config)

    def evaluate(self, path: str) -> Evaluation:
        """Restores a checkpoint and counts every example once.

        Raises:
          RunError: the checkpoint cannot be restored into this network.
          DataError: the examples cannot be had, or are not as many as they should be.
        """
        start = time.perf_counter()
        checkpoint.restore(self._saver, self._session, path)
        sums, count, confusion = self._count()
        if count != self._examples.num_examples:
            raise errors.DataError(
                f"{self._examples.name}: gave {count} examples or more, where there should be "
                f"{self._examples.num_examples}. Mend num_examples= or the dataset."
            )
        return Evaluation(
            step=checkpoint.step_of(path),
            data=self._examples.name,
            num_examples=count,
            weights=self._weights,
            metrics={name: _metric(*moments, count) for name, moments in sums.items()},
            confusion=None if confusion is None else confusion.tolist(),
            class_names=self._examples.class_names,
            seconds=time.perf_counter() - start,
            several_views=self._several_views,
        )

    def _count(self) -> tuple[dict, int, np.ndarray | None]:
        """{metric: (sum, whether only zeros and ones)}, the number of examples, the confusion matrix."""
        built, classes = self._built, len(self._examples.class_names)
        fetches = {"metrics": built.metrics}
        if classes:
            fetches |= {"labels": built.labels, "predictions": built.predictions}
        confusion = np.zeros([classes, classes], np.int64) if classes else None
        sums, count = {name: [0.0, True] for name in built.metrics}, 0
        self._session.run(self._prepare)
        # A dataset in an order of its own may hold fewer examples than it should, or more.
        for _ in range(built.num_steps + bool(self._examples.elements)):
            try:
                with input_stream.failures_named(self._examples.name, may_end=True):
                    values = self._session.run(fetches)
            except tf.errors.OutOfRangeError:
                break
            for name, per_example in values["metrics"].items():
                sums[name][0] += float(per_example.sum(dtype=np.float64))
                sums[name][1] &= bool(np.isin(per_example, (0, 1)).all())
            count += len(per_example)
            if classes:
                np.add.at(confusion, (values["labels"], values["predictions"]), 1)
        return sums, count, confusion

    def close(self) -> None:
        self._session.close()


def _metric(total: float, is_proportion: bool, count: int) -> Metric:
    return Metric(total / count, *(wilson_interval(total, count) if is_proportion else ()))
