"""Lines about evaluations, for people."""

from tower_train.inference.evaluator import Evaluation, Metric
from tower_train.run_dir import logs

_WIDEST = 120  # columns of a confusion matrix with names over them


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Formats the metrics of an evaluation, each with its 95 % interval."""
    described = (
        f"{evaluation.data}, {evaluation.weights}{', several views of each' if evaluation.several_views else ''}"
    )
    lines = [f"step {evaluation.step}: {evaluation.num_examples} examples of {described}"]
    return lines + [with_interval(name, metric) for name, metric in evaluation.metrics.items()]


def with_interval(name: str, metric: Metric) -> str:
    """Formats a metric and its 95 % interval, if it has one."""
    if metric.low is None:
        return f"{name} = {logs.as_text(metric.mean)}"
    return f"{name} = {metric.mean:.3f} (95 % interval {metric.low:.3f} to {metric.high:.3f})"


def comparison_lines(on_training: Evaluation, evaluation: Evaluation) -> list[str]:
    """Formats the metrics on training examples beside those on unseen ones, in one line."""
    compared = []
    for name, metric in on_training.metrics.items():
        above = metric.mean - evaluation.metrics[name].mean
        as_text = logs.as_text if metric.low is None else "{:.3f}".format
        compared.append(f"{name} = {as_text(metric.mean)} ({as_text(abs(above))} {'above' if above >= 0 else 'below'})")
    return [f"on {on_training.num_examples} training examples: {', '.join(compared)}"]


def confusion_lines(matrix: list[list[int]], class_names: tuple[str, ...]) -> list[str]:
    """Formats a confusion matrix: a row per true class, a column per predicted one, by number if names are too wide."""
    rows = columns = class_names
    longest = max(len(name) for name in class_names)
    if longest + len(columns) * (longest + 1) > _WIDEST:
        columns = [str(i) for i in range(len(class_names))]
        rows = [f"{name} {i}" for i, name in enumerate(class_names)]
    label = max(len(name) for name in rows)
    width = 1 + max(len(str(entry)) for entry in [*columns, *(count for row in matrix for count in row)])
    table = [
        name.rjust(label) + "".join(str(entry).rjust(width) for entry in row)
        for name, row in [("", columns), *zip(rows, matrix, strict=True)]
    ]
    return ["confusion matrix (row: true class, column: predicted class)", *table]
