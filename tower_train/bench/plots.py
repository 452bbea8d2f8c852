"""The figure of results, fit for a paper, on a background of its own: as SVG, and as PNG with two dots for one."""

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence

from tower_train.bench.measure import Result
from tower_train.inference import curves

_WIDTH = 8.0  # inches
_COLORS = {"others": "#e69f00", "tower_train": "#0072b2"}  # distinct also for the colour-blind


def draw(parts: Mapping[str, Sequence[Result]], stem: pathlib.Path) -> list[pathlib.Path]:
    """Draws a panel of bars for each part, with whiskers from the lowest to the highest round, into STEM.svg and
    STEM.png; returns the paths, none without matplotlib (pip install 'tower_train[plots]')."""
    if not importlib.util.find_spec("matplotlib"):
        return []
    import matplotlib
    from matplotlib.figure import Figure

    paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
    with matplotlib.rc_context(curves.STYLE | {"axes.titlesize": 10}):
        sizes = [len(rows) + 2 for rows in parts.values()]
        figure = Figure(figsize=(_WIDTH, 1.2 + 0.22 * sum(sizes)), layout="constrained")
        figure.get_layout_engine().set(rect=(0.02, 0, 0.96, 1))  # an SVG's reader may have wider fonts than are here
        grid = figure.subplots(len(parts), squeeze=False, height_ratios=sizes)[:, 0]
        legend = {}
        for axis, (title, rows) in zip(grid, parts.items(), strict=True):
            _draw_bars(axis, rows)
            axis.set_title(title if len(parts) > 1 else "")
            handles, labels = axis.get_legend_handles_labels()
            legend |= zip(labels, handles, strict=True)
        grid[-1].set_xlabel("examples/sec (written beside the bars)")
        figure.legend(legend.values(), legend, loc="outside upper center", ncols=len(legend), frameon=False)
        for path in paths:
            figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_bars(axis, rows: Sequence[Result]) -> None:
    places = range(len(rows), 0, -1)
    for place, row in zip(places, rows, strict=True):
        rate, kind = row.rate, "tower_train" if row.side.name.startswith("tower_train/") else "others"
        spread = [[rate.median - rate.low], [rate.high - rate.median]]
        axis.barh(place, rate.median, 0.7, color=_COLORS[kind], label=kind, xerr=spread, error_kw={"elinewidth": 1.2})
        beside = dict(xycoords=axis.get_yaxis_transform(), textcoords="offset points", va="center", ha="right")
        axis.annotate(f"{rate.median:,.0f}", (1, place), (36, 0), **beside)
    axis.set_yticks(places, [row.side.title for row in rows])
    axis.set_ylim(0.4, len(rows) + 0.6)
