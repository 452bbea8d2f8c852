"""Evaluation: every example exactly once, on the weights of a checkpoint."""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples
from tower_train.graph import devices, step_failures
from tower_train.inference.evaluation_graph import check_modes, evaluation_graph
from tower_train.inference.whole_set import WholeSet
from tower_train.measures import MIN
from tower_train.run_dir import checkpoint
from tower_train.workload import Workload

v1 = tf.compat.v1
_Z = statistics.NormalDist().inv_cdf(0.975)  # the two-sided 95 % quantile
_MOST_CLASSES = 200  # in a confusion matrix
LOSS = "loss"  # the metric that the training minimises, without weight decay


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's mean over all examples."""

    mean: float  # over all examples
    low: float | None = None  # bounds of its 95 % interval; None if it is no proportion
    high: float | None = None
    mode: str | None = None  # 'min' or 'max', the best values; None if unknown


@dataclasses.dataclass
class _Totals:
    """Sums over examples: {metric: [sum, whether only zeros and ones]}, their number, the losses, and the numbers of
    (class, predicted class)."""

    sums: dict[str, list]
    count: int = 0
    loss: float = 0.0
    pairs: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    step: int  # the checkpoint's
    data: str  # name of the examples
    num_examples: int  # number of examples, each counted once
    weights: str  # 'moving averages' or 'raw weights'
    metrics: dict[str, Metric]  # by name
    # [true class][predicted class], counts; None if labels are not classes, or there are more than 200
    confusion: list[list[int]] | None
    class_names: tuple[str, ...]  # of its rows and columns
    seconds: float  # its duration
    several_views: bool = False  # whether outputs are means over several views of each example

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Returns the 95 % interval of a proportion (Wilson 1927), which unlike the normal one holds near 0 and 1 too."""
    share = successes / trials
    scale = 1 + _Z**2 / trials
    center = (share + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    return max(0.0, center - half), min(1.0, center + half)


class Evaluator:
    """Evaluates checkpoints of one run with one graph and one session.

    The result does not depend on tower_batch. With a moving_average_decay of 0 it evaluates the weights themselves.
    """

    def __init__(
        self,
        workload: Workload,
        examples: Examples,
        tower_batch: int,
        dtype: str,
        moving_average_decay: float,
        placed: devices.Devices,
        is_compiled: bool = False,
    ):
        self._workload, self.examples, self._tower_batch = workload, examples, tower_batch
        # after `try_out`, the deciding metric's name and its mode, 'min', 'max' or None if unknown
        self.first_metric: tuple[str, str | None] | None = None
        self._whole = WholeSet(() if callable(workload.metrics) else workload.metrics, examples.class_names)
        self._weights = "moving averages" if moving_average_decay else "raw weights"
        self.built = evaluation_graph(workload, examples, tower_batch, dtype, moving_average_decay, placed, is_compiled)
        with self.built.graph.as_default():
            self._saver = v1.train.Saver(self.built.restored)
            self._prepare = [v1.local_variables_initializer(), v1.tables_initializer(), self.built.stream_initializer]
            self._initial = [variable.initializer for variable in v1.global_variables()]
        self._config = placed.session_config
        self._session = v1.Session(graph=self.built.graph, config=self._config)

    def try_out(self, trained: Sequence[tf.Variable]) -> None:
        """Evaluates one batch with the network's initial values, so that failures show before the training, whose
        variables are `trained`.

        Raises:
          DataError: the examples cannot be read, or there are none.
          GraphError: the network or the metrics fail on them, or the network has other variables than in training.
        """
        shapes = {variable.op.name: variable.shape for variable in trained}
        for name, variable in self.built.restored.items():
            if shapes.get(name) != variable.shape:
                raise errors.GraphError(
                    f"workload {self._workload.name}: its network has the variable {name} {variable.shape} for "
                    f"{self.examples.name}, and {shapes.get(name, 'none of that name')} in training. Let `inference` "
                    "create the same variables for all examples, and also without training."
                )
        # A separate session, whose end also ends the stream.
        with v1.Session(graph=self.built.graph, config=self._config) as session:
            length = None if self.built.length is None else int(session.run(self.built.length))
            if length not in (None, tf.data.UNKNOWN_CARDINALITY):
                self._check_count(length, "")
            session.run(self._initial)
            metrics = self._metrics(self._count(session, 1))
        self.first_metric = next((name, metric.mode) for name, metric in metrics.items())

    def evaluate(self, path: str, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Restores a checkpoint and counts every example once. after_batch: called after each batch; its errors end the
        evaluation.

        Raises:
          RunError: the checkpoint cannot be restored into this network.
          DataError: the examples cannot be read, or are fewer or more than they should be.
        """
        start = time.perf_counter()
        checkpoint.restore(self._saver, self._session, path)
        # A dataset in its own order may hold fewer or more examples than it should.
        totals = self._count(self._session, self.built.num_steps + bool(self.examples.elements), after_batch)
        self._check_count(totals.count, " or more")
        names = self.examples.class_names if "predictions" in self.built.fetches else ()
        numbers, matrix = range(len(names)), None
        if 0 < len(names) <= _MOST_CLASSES:
            matrix = [[totals.pairs.get((true, predicted), 0) for predicted in numbers] for true in numbers]
        return Evaluation(
            step=checkpoint.saved_step(path),
            data=self.examples.name,
            num_examples=totals.count,
            weights=self._weights,
            metrics=self._metrics(totals),
            confusion=matrix,
            class_names=names if matrix else (),
            seconds=time.perf_counter() - start,
            several_views=self._workload.test_time_augmentation is not None,
        )

    def _check_count(self, count: int, or_more: str) -> None:
        if count != self.examples.num_examples:
            received = "endless examples" if count == tf.data.INFINITE_CARDINALITY else f"{count} examples{or_more}"
            raise errors.DataError(
                f"{self.examples.name}: gave {received}, where there should be {self.examples.num_examples}. "
                "Mend num_examples= or the dataset."
            )

    def _count(self, session: v1.Session, most_steps: int, after_batch=lambda: None) -> "_Totals":
        """Returns the totals over a number of steps, or fewer if the examples end."""
        fetches = self.built.fetches
        totals = _Totals({name: [0.0, True] for name in fetches["metrics"]})
        session.run(self._prepare)
        self._whole.reset()
        for _ in range(most_steps):
            try:
                with step_failures.explained(self.examples, self._workload.name, True, self._tower_batch):
                    values = session.run(fetches)
            except tf.errors.OutOfRangeError:
                break
            for name, per_example in values["metrics"].items():
                totals.sums[name][0] += float(per_example.sum(dtype=np.float64))
                totals.sums[name][1] &= bool(np.isin(per_example, (0, 1)).all())
            totals.count += int(values["number"])
            totals.loss += float(values.get("loss", math.nan))
            if "whole" in values:
                self._whole.add(*values["whole"])
            if "predictions" in values:
                self.examples.check_labels(values["labels"])
                classes, predicted = (values[name].ravel().tolist() for name in ("labels", "predictions"))
                totals.pairs.update(zip(classes, predicted, strict=True))
            after_batch()
        if not totals.count:
            raise errors.DataError(f"{self.examples.name}: its dataset gives no examples.")
        return totals

    def _metrics(self, totals: "_Totals") -> dict[str, Metric]:
        """Returns the metrics by name, and last the loss, unless a metric has its name."""
        metric_mode, count, metrics = self._workload.metric_mode, totals.count, {}
        for name, (total, is_proportion) in totals.sums.items():
            interval = wilson_interval(total, count) if is_proportion else (None, None)
            metrics[name] = Metric(total / count, *interval, metric_mode(name))
        if "whole" in self.built.fetches:
            results = self._whole.results().items()
            metrics = {name: Metric(value, mode=metric_mode(name) or mode) for name, (value, mode) in results}
            check_modes(self._workload, metrics)
        if "loss" in self.built.fetches and LOSS not in metrics:
            metrics[LOSS] = Metric(totals.loss / count, mode=MIN)
        return metrics

    def close(self) -> None:
        self._session.close()
