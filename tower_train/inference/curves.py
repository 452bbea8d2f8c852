"""The curves of runs: their history, a figure of it, and a table."""

import io
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tower_train import errors, files
from tower_train.console import one_line
from tower_train.run_dir import disk, json_files
from tower_train.run_dir.json_files import OF_EVALUATION

_MOST_PANELS = 4
_NOTE = (
    "The training loss: of augmented batches, with dropout and weight decay. All else: without, by averaged weights."
)
_MARKS = {".png": b"tEXtSoftware\0tower_train", ".svg": b"<dc:title>tower_train</dc:title>"}  # of what was drawn here
_METADATA = {".png": {"Software": "tower_train"}, ".svg": {"Creator": "tower_train", "Date": None}}
ENDINGS = tuple(_METADATA)
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # distinct also for the colour-blind
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "tower_train",
    "svg.fonttype": "none",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def history(train_dir: str) -> dict[str, list]:
    """Reads the history of a run over all its starts: {name: values}, by the names of Keras' History.

    `step`, `epoch`, `loss` and so on have a value for each log line; `val_step`, `val_epoch`, `val_loss` and the
    metrics, such as `val_precision @ 1`, for each evaluation; None if it has none.

    Raises:
      RunError: there is no run.
    """
    path = pathlib.Path(train_dir, json_files.METRICS)
    try:
        *lines, _ = files.read_in_run(path).split(b"\n")  # a power cut leaves half of a last line
        records = list(map(json_files.record, lines))
        if None in records:
            raise ValueError(f"line {records.index(None) + 1} is no record of a run")
    except (OSError, ValueError) as error:
        raise errors.RunError(
            f"{path} cannot be read ({errors.reason(error)}). Name the directory of a run that has trained."
        ) from None
    if not any("loss" in record for record in records):
        raise errors.RunError(f"{path} has no log lines yet. Wait for some, or train with fewer --log_every_steps.")
    lists: dict[str, list] = {}
    for is_evaluation in (False, True):
        lines_of_kind = [each for each in records if json_files.is_evaluation(each) == is_evaluation]
        for name in dict.fromkeys(name for each in lines_of_kind for name in each):
            prefix = OF_EVALUATION if is_evaluation and name in ("step", "epoch") else ""
            lists[prefix + name] = [each.get(name) for each in lines_of_kind]
    return lists


def metric_names(*histories: Mapping[str, Sequence]) -> list[str]:
    """Returns the names of the metrics that evaluations have, such as `val_precision @ 1`; the loss is none."""
    names = [name for lists in histories for name in lists if name.startswith(OF_EVALUATION)]
    return [name for name in dict.fromkeys(names) if name not in ("val_loss", "val_step", "val_epoch")]


def draw_curves(*train_dirs: str):
    """Draws the loss of training and validation, and the metrics, of one or several runs; returns a matplotlib Figure,
    which a notebook shows.

    Raises:
      RunError: a directory has no run.
      ConfigError: matplotlib is not installed, or no run is named.
    """
    if not train_dirs:
        raise errors.ConfigError("draw_curves() names no run. Give the directory of one or several.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.ConfigError("Curves need matplotlib: pip install matplotlib.") from None
    runs = _read(train_dirs)
    metrics = metric_names(*(run.mean for run in runs))
    panels = ["loss", *(name.removeprefix(OF_EVALUATION) for name in metrics[: _MOST_PANELS - 1])]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(panels), 3.2 + 0.2 * len(runs)), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for run, color in zip(runs, itertools.cycle(_COLORS), strict=False):
                _draw(axis, run, name, color)
            low, high = axis.dataLim.intervaly
            is_wide = name == "loss" and 0 < 100 * low < high
            axis.set(xlabel="epochs", ylabel=_plain(name), yscale="log" if is_wide else "linear")
            axis.grid(color="#dddddd", linewidth=0.5)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", frameon=False, ncols=len(panels))
        if metrics:
            figure.supxlabel(_NOTE, fontsize=7, color="#555555")
    figure._repr_png_ = lambda: _drawn(figure, "png")  # by which a notebook shows it, without pyplot
    return figure


def _plain(text: str) -> str:
    """Returns a text in which matplotlib finds no formulas."""
    return one_line(text).replace("$", r"\$")


def _drawn(figure, form: str, **options) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=form, **options)
    return file.getvalue()


def save(figure, stem: str, endings: Sequence[str] = ENDINGS) -> str:
    """Writes a figure to STEM.png and STEM.svg, also over earlier ones; returns a line that names the files. Raises
    ConfigError for a file that cannot be written."""
    import matplotlib

    paths = [pathlib.Path(stem + ending).absolute() for ending in endings]
    with matplotlib.rc_context(STYLE):
        for path, ending in zip(paths, endings, strict=True):
            disk.write(path, _drawn(figure, ending[1:], dpi=200, metadata=_METADATA[ending]))
    return f"Drawn:    {', '.join(map(str, paths))}"


def check_replaceable(stem: str, endings: Sequence[str] = ENDINGS) -> None:
    """Raises ConfigError if a file that `save` would write is there and was drawn by something else."""
    for ending in endings:
        files.check_replaceable(pathlib.Path(stem + ending).absolute(), _MARKS[ending])


class _Run(NamedTuple):
    """A run as it is drawn, or one of several seeds."""

    label: str
    split: str  # that its evaluations look at
    members: list[dict[str, list]]  # over seeds, the history
    mean: dict[str, np.ndarray]  # of the members, as far as all go


def _read(train_dirs: Sequence[str]) -> list[_Run]:
    runs, paths = [], list(map(os.path.abspath, train_dirs))
    common = os.path.commonpath(map(os.path.dirname, paths))
    for path in paths:
        seeds = seed_runs(path)
        label = os.path.relpath(path, common) + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")
        # by the folder of its event files
        split = "validation" if pathlib.Path(seeds[0], "eval-validation").exists() else "test"
        members = [history(seed) for seed in seeds]
        shared = [name for name in members[0] if all(name in each for each in members)]
        runs.append(_Run(label, split, members, {name: _stacked(members, name).mean(axis=0) for name in shared}))
    return runs


def _draw(axis, run: _Run, name: str, color: str) -> None:
    """Draws a curve of training, thin, and one of evaluations, thick with points; fills from the lowest to the highest
    of several seeds."""
    of_training = ("loss", "epoch") if name == "loss" else (f"train_{name}", "val_epoch")
    for (values, epochs), what, style in (
        (of_training, "training", {"linewidth": 0.8, "alpha": 0.7}),
        ((OF_EVALUATION + name, "val_epoch"), run.split, {"linewidth": 1.6, "marker": "."}),
    ):
        if values in run.mean:
            at = run.mean[epochs]
            axis.plot(at, run.mean[values], color=color, label=f"{_plain(run.label)}, {what}", **style)
            if len(run.members) > 1 and values != f"train_{name}":
                each = _stacked(run.members, values)
                axis.fill_between(at, each.min(axis=0), each.max(axis=0), color=color, alpha=0.2, linewidth=0)


def seed_runs(train_dir: str) -> list[str]:
    """Returns the runs of a directory: those of --seeds below it, else itself."""
    seeds = [path.parent for path in pathlib.Path(train_dir).glob(f"seed-*/{json_files.METRICS}")]
    if not seeds or pathlib.Path(train_dir, json_files.METRICS).exists():
        return [train_dir]
    return sorted(map(str, seeds), key=lambda seed: (len(seed), seed))


def _stacked(members: Sequence[Mapping[str, list]], name: str) -> np.ndarray:
    """Returns the values of histories as far as all go, [runs, points]; unknown ones are NaN."""
    return np.array(list(zip(*(lists.get(name, []) for lists in members), strict=False)), float).T


def table(train_dirs: Sequence[str]) -> list[str]:
    """Returns lines: the last step of each run, and its last, lowest and highest values."""
    rows = [("run", "", "last", "lowest", "highest")]
    for run in _read(train_dirs):
        rows.append((run.label, "step", f"{max([*run.mean['step'], *run.mean.get('val_step', [])]):.0f}", "", ""))
        for name, values in run.mean.items():
            known = values[~np.isnan(values)]
            is_shown = name == "loss" or name.startswith(OF_EVALUATION) and name not in ("val_step", "val_epoch")
            if is_shown and known.size:
                split = "training" if name == "loss" else run.split
                quantity = f"{split} {name.removeprefix(OF_EVALUATION)}"
                rows.append(("", quantity, *(f"{value:.4g}" for value in (known[-1], min(known), max(known)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
