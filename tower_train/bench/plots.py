"""The figure of results, fit for a paper, on a background of its own: as SVG, and as PNG with two dots for one."""

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence

from tower_train.bench.results import Result

_WIDTH = 8.0  # inches
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "tower_train",
    "svg.fonttype": "none",
}
_COLORS = {"others": "#e69f00", "tower_train": "#0072b2"}  # distinct also for the colour-blind
_CEILING = "ceiling: matrix products alone"


def draw(parts: Mapping[str, Sequence[Result]], stem: pathlib.Path) -> list[pathlib.Path]:
    """Draws a panel of bars for each part, with whiskers from the lowest to the highest round, into STEM.svg and
    STEM.png; returns the paths, none without matplotlib (pip install 'tower_train[plots]')."""
    if not importlib.util.find_spec("matplotlib"):
        return []
    import matplotlib
    from matplotlib.figure import Figure

    panels = {title: [row for row in rows if not row.side.is_ceiling] for title, rows in parts.items()}
    panels = {title: rows for title, rows in panels.items() if rows}
    if not panels:
        return []
    paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
    with matplotlib.rc_context(_STYLE):
        sizes = [len(rows) + 2 for rows in panels.values()]
        figure = Figure(figsize=(_WIDTH, 1.2 + 0.22 * sum(sizes)), layout="constrained")
        figure.get_layout_engine().set(rect=(0.02, 0, 0.96, 1))  # an SVG's reader may have wider fonts than are here
        grid = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
        for axis, (title, rows) in zip(grid, panels.items(), strict=True):
            _draw_bars(axis, rows)
            axis.set_title(title if len(panels) > 1 else "")
        grid[-1].set_xlabel("examples/sec (written beside the bars)")
        _draw_legend(figure, [row for rows in panels.values() for row in rows])
        for path in paths:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_bars(axis, rows: Sequence[Result]) -> None:
    places, rates = range(len(rows), 0, -1), [row.rate for row in rows]
    spreads = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
    axis.barh(
        places,
        [rate.median for rate in rates],
        height=0.7,
        color=[_COLORS[_kind(row)] for row in rows],
        xerr=spreads,
        error_kw={"ecolor": "black", "elinewidth": 1.2},
    )
    for place, row in zip(places, rows, strict=True):
        axis.annotate(
            f"{row.rate.median:,.0f}",
            (1, place),
            (36, 0),
            axis.get_yaxis_transform(),
            "offset points",
            va="center",
            ha="right",
        )
        if row.ceiling:
            axis.plot([row.ceiling] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axis.set_yticks(places, [row.side.title for row in rows])
    axis.set_ylim(0.4, len(rows) + 0.6)


def _draw_legend(figure, rows: Sequence[Result]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {_kind(row) for row in rows}
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in kinds]
    if any(row.ceiling for row in rows):
        mark = dict(marker="|", markersize=11, markeredgewidth=2, linestyle="", color="black")
        handles.append(Line2D([], [], label=_CEILING, **mark))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def _kind(row: Result) -> str:
    return "tower_train" if row.side.name.startswith("tower_train/") else "others"
