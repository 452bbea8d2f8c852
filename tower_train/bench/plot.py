"""Plots of the results, if matplotlib is installed (pip install 'tower_train[plots]')."""

import importlib.util
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence

from tower_train.bench.report import Row
from tower_train.bench.systems import CEILING, TRAINER

_COLORS = {TRAINER: "tab:blue", CEILING: "tab:gray"}
_RIVAL_COLOR = "tab:orange"
_TOWERS = re.compile(rf"{TRAINER}/(\d+) towers?/(.+)")


def comparison(rows: Sequence[Row], on_gpus: bool, path: pathlib.Path) -> list[pathlib.Path]:
    """Two panels: throughput by system, and throughput over the tower count against perfect scaling.

    Returns:
      The paths written: none without matplotlib.
    """
    pyplot = _pyplot()
    if not pyplot or not rows:
        return []
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.3 * len(rows)), width_ratios=[3, 2])
    places = range(len(rows), 0, -1)
    colors = [_COLORS.get(row.name.partition("/")[0], _RIVAL_COLOR) for row in rows]
    spreads = [[row.per_sec - row.low for row in rows], [row.high - row.per_sec for row in rows]]
    bars = left.barh(places, [row.per_sec for row in rows], xerr=spreads, color=colors, error_kw={"ecolor": "0.3"})
    left.bar_label(bars, [f"{row.per_sec:.0f}" for row in rows], padding=3)
    left.set_yticks(places, [row.name for row in rows])
    left.set_xlim(0, 1.12 * max(row.high for row in rows))
    left.set(xlabel="examples/sec (median, quartiles)", title="Throughput by system")
    scaling = _scaling(rows)
    for name, by_towers in scaling.items():
        (line,) = right.plot(list(by_towers), list(by_towers.values()), "o-", label=name)
        right.plot(list(by_towers), perfect_scaling(by_towers, on_gpus), ":", color=line.get_color())
    if scaling:
        _over(right, sorted(set().union(*scaling.values())), "towers, at one global batch")
        right.set_title("Against perfect scaling (dotted)")
        right.legend()
    else:
        right.set_axis_off()
    return _save(figure, path)


def sweep(curves: Mapping[str, Mapping[int, float]], on_gpus: bool, path: pathlib.Path) -> list[pathlib.Path]:
    """A panel for each curve, {label of x: {x: examples/sec}}; the one over towers against perfect scaling.

    Returns:
      The paths written: none without matplotlib.
    """
    pyplot = _pyplot()
    if not pyplot:
        return []
    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for axis, (name, curve) in zip(axes[0], curves.items(), strict=True):
        (line,) = axis.plot(list(curve), list(curve.values()), "o-")
        if name.startswith("towers"):
            perfect = perfect_scaling(curve, on_gpus)
            axis.plot(list(curve), perfect, ":", color=line.get_color(), label="perfect scaling")
            axis.legend()
        _over(axis, curve, name)
    return _save(figure, path)


def perfect_scaling(by_towers: Mapping[int, float], on_gpus: bool) -> list[float]:
    """The throughput at each tower count if more towers cost nothing, from that of the fewest.

    It grows with the number of GPUs. Logical CPU devices share the same cores, which one tower keeps busy: there it
    stays the same.
    """
    fewest = min(by_towers)
    return [by_towers[fewest] * (towers / fewest if on_gpus else 1) for towers in by_towers]


def _over(axis, xs: Collection[int], xlabel: str) -> None:
    """Labels an axis of examples/sec over powers of two, or nearly; it begins at 0."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(xs), [f"{x:,}" for x in xs])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * axis.dataLim.ymax)
    axis.set(xlabel=xlabel, ylabel="examples/sec")


def _scaling(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """{dtype and inputs: {towers: examples/sec}} of all that was measured with more than one tower count."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if match := _TOWERS.fullmatch(row.name):
            found.setdefault(match[2], {})[int(match[1])] = row.per_sec
    return {name: by_towers for name, by_towers in found.items() if len(by_towers) > 1}


def _pyplot():
    if not importlib.util.find_spec("matplotlib"):
        return None
    import matplotlib

    matplotlib.use("Agg")  # draws into files, with or without a display
    from matplotlib import pyplot

    return pyplot


def _save(figure, path: pathlib.Path) -> list[pathlib.Path]:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return [path]
