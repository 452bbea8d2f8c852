"""Metrics of a whole set that are not means over examples: keras.metrics, and functions of all outputs."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.measures import MAX, MIN

_MODES = {"up": MAX, "down": MIN}  # as Keras' own monitors ask its metrics


class WholeSet:
    """Computes metrics of all outputs and labels, which come batch by batch.

    Args:
      metrics: keras.metrics.Metric objects, and functions (outputs, labels) -> a number, of numpy arrays.
      class_names: for metrics with one number per class.
    """

    def __init__(self, metrics: Sequence[Any], class_names: Sequence[str]):
        tf.get_logger().addFilter(_is_wanted)
        self._streaming = [metric for metric in metrics if hasattr(metric, "update_state")]
        self._functions = [metric for metric in metrics if not hasattr(metric, "update_state")]
        self._order, self._class_names = [_name(metric) for metric in metrics], class_names
        if twice := [name for name in self._order if self._order.count(name) > 1]:
            raise errors.GraphError(f"two metrics are called {twice[0]!r}. Give each a name of its own.")
        self._batches: list = []

    def reset(self) -> None:
        self._batches = []
        for metric in self._streaming:
            _called(metric, metric.reset_state)

    def add(self, outputs, labels) -> None:
        """Takes a batch, arrays [batch, ...] or structures of them."""
        if self._functions:
            self._batches.append((outputs, labels))
        for metric in self._streaming:
            _called(metric, functools.partial(metric.update_state, labels, outputs), outputs, labels)

    def results(self) -> dict[str, tuple[float, str | None]]:
        """Returns {name: (value, 'min' or 'max' if known)} in the order of the metrics; one for each class of a metric
        by class."""
        values = {metric.name: _called(metric, metric.result) for metric in self._streaming}
        if self._functions:
            outputs, labels = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *self._batches)
            for function in self._functions:
                compute = functools.partial(function, outputs, labels)
                values[_name(function)] = _called(function, compute, outputs, labels)
        results, modes = {}, {m.name: _MODES.get(getattr(m, "_direction", None)) for m in self._streaming}
        for name in self._order:
            for part, value in _parts(name, values[name], self._class_names).items():
                if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
                    raise errors.GraphError(
                        f"the metric {name!r} is of shape {list(np.shape(value))}. It must be a number, one for each "
                        "class, or a dictionary of these."
                    )
                results[part] = float(value), modes.get(name)
        return results


def _is_wanted(record: logging.LogRecord) -> bool:
    """Returns False for the warning of functions traced anew, as keras.metrics.AUC(multi_label=True) does by batch."""
    return "tf.function retracing" not in record.getMessage()


def _name(metric) -> str:
    return getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__)


def _parts(name: str, value, class_names: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name} {key}": np.asarray(part) for key, part in value.items()}
    value = np.asarray(value)
    if value.ndim != 1:
        return {name: value}
    names = class_names if len(class_names) == len(value) else range(len(value))
    return {f"{name} {class_name}": part for class_name, part in zip(names, value, strict=True)}


def _called(metric, call: Callable[[], Any], *arrays) -> Any:
    """Returns call(), outside of any graph; GraphError that names the metric if it fails."""
    try:
        with futures.ThreadPoolExecutor(1) as thread:  # in which no graph is entered
            return thread.submit(call).result()
    except Exception as error:  # of the user's
        shapes = [" and ".join(str(list(np.shape(a))) for a in tf.nest.flatten(each)) for each in arrays]
        given = f" on outputs {shapes[0]} and labels {shapes[1]}" if arrays else ""
        raise errors.GraphError(f"the metric {_name(metric)!r} fails{given}: {error}") from error
