"""The curves of runs: their history, a figure of it, and a table."""

import io
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from tower_train import errors
from tower_train.run_dir import json_files

OF_EVALUATION = "val_"  # the beginning of the names of an evaluation's metrics, as Keras has them
_MOST_PANELS = 4
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # distinct also for the colour-blind
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tower_train",
          "svg.fonttype": "none", "figure.facecolor": "white", "savefig.facecolor": "white"}  # fmt: skip
# Options that name places or reports, which do not change what is learnt.
_NO_LABELS = {"train_dir", "data_dir", "override", "log_every_steps", "summary_every_steps", "save_every_steps"}


def history(train_dir: str) -> dict[str, list]:
    """Reads the history of a run over all its starts: {name: values}, by the names of Keras' History.

    `step`, `epoch`, `loss` and so on have a value for each log line; `val_step`, `val_epoch`, `val_loss` and the
    metrics, such as `val_precision @ 1`, for each evaluation.

    Raises:
      RunError: there is no run.
    """
    path = pathlib.Path(train_dir, json_files.METRICS)
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise errors.RunError(
            f"{path} cannot be read ({errors.reason(error)}). Name the directory of a run that has trained."
        ) from None
    if not any("loss" in record for record in records):
        raise errors.RunError(f"{path} has no log lines yet. Wait for some, or train with fewer --log_every_steps.")
    lists: dict[str, list] = {}
    for record in records:
        is_evaluation = any(name.startswith(OF_EVALUATION) for name in record)
        for name, value in record.items():
            prefix = OF_EVALUATION if is_evaluation and name in ("step", "epoch") else ""
            lists.setdefault(prefix + name, []).append(value)
    return lists


def curves(*train_dirs: str):
    """Draws the loss of training and validation, and the metrics, of one or several runs.

    Args:
      train_dirs: the runs, which are named by the options in which they differ.

    Returns:
      A matplotlib Figure, which a notebook shows.

    Raises:
      RunError: a directory has no run.
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.ConfigError("Curves need matplotlib: pip install matplotlib.") from None
    histories = dict(zip(labels(train_dirs), map(history, train_dirs), strict=True))
    metrics = [name for lists in histories.values() for name in lists if name.startswith(OF_EVALUATION)]
    metrics = [name for name in dict.fromkeys(metrics) if name not in ("val_loss", "val_step", "val_epoch")]
    panels = ["loss", *metrics[: _MOST_PANELS - 1]]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2 * len(panels), 3.2 + 0.2 * len(histories)), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for color, (label, lists) in zip(_repeated(_COLORS, len(histories)), histories.items(), strict=True):
                _draw(axis, lists, name.removeprefix(OF_EVALUATION), color, label)
            axis.set_xlabel("epochs")
            axis.set_ylabel(name.removeprefix(OF_EVALUATION))
            axis.grid(color="#dddddd", linewidth=0.5)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", frameon=False, ncols=min(3, len(histories)))
    figure._repr_png_ = lambda: _png(figure)  # by which a notebook shows it, without pyplot
    return figure


def _png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def save(figure, stem: str) -> list[str]:
    """Writes a figure to STEM.png and STEM.svg; returns the paths."""
    import matplotlib

    paths = [f"{stem}{ending}" for ending in (".png", ".svg")]
    with matplotlib.rc_context(_STYLE):
        for path in paths:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.endswith(".svg") else None)
    return paths


def _draw(axis, lists: Mapping[str, list], name: str, color: str, label: str) -> None:
    """Draws a curve of training, thin, and one of validation, thick with points."""
    if name == "loss":
        values = [math.nan if value is None else value for value in lists["loss"]]
        axis.plot(lists["epoch"], values, color=color, linewidth=0.8, alpha=0.7, label=f"{label}, training")
    elif train := lists.get(f"train_{name}"):
        axis.plot(lists["val_epoch"], train, color=color, linewidth=0.8, alpha=0.7)
    if values := lists.get(OF_EVALUATION + name):
        axis.plot(lists["val_epoch"], values, color=color, marker=".", linewidth=1.6, label=f"{label}, evaluation")


def labels(train_dirs: Sequence[str]) -> list[str]:
    """Returns a name for each run: the options in which it differs from others, or else its directory."""
    options = []
    for train_dir in train_dirs:
        run_json = json_files.read(pathlib.Path(train_dir, json_files.RUN))
        options.append(run_json.get("config", {}) | run_json.get("workload_options", {}))
    names = [name for name in options[0] if name not in _NO_LABELS and len({str(o.get(name)) for o in options}) > 1]
    texts = [", ".join(f"{name}={each.get(name)}" for name in names) for each in options]
    are_unique = len(set(texts)) == len(texts) and all(texts)
    return texts if are_unique else [pathlib.Path(train_dir).name for train_dir in train_dirs]


def table(train_dirs: Sequence[str]) -> list[str]:
    """Returns lines: for each run its last step, and of each loss and metric the last value and the best."""
    rows = [("run", "", "last", "lowest", "highest")]
    for label, lists in zip(labels(train_dirs), map(history, train_dirs), strict=True):
        rows.append((label, "step", str(max(lists["step"] + lists.get("val_step", []))), "", ""))
        for name, values in lists.items():
            known = [value for value in values if value is not None]
            if (name == "loss" or name.startswith(OF_EVALUATION)) and name not in ("val_step", "val_epoch") and known:
                rows.append(("", name, *(f"{value:.4g}" for value in (known[-1], min(known), max(known)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _repeated(colors: Sequence[str], count: int) -> list[str]:
    return [colors[i % len(colors)] for i in range(count)]
