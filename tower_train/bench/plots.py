"""Figures of results, fit for a paper, on a background of their own: as SVG, and as PNG with two dots for one."""

import importlib.util
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from tower_train import errors
from tower_train.bench import report, results, systems
from tower_train.bench.results import Results, Row

_WIDTH, _LETTERS_A_LINE = 10.0, 160  # of a figure, in inches; of its caption
_FEWEST_POINTS, _FEWEST_BARS = 3, 3  # of a panel; smaller ones are in the table only
_STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
          "svg.hashsalt": "tower_train", "svg.fonttype": "none",
          "axes.prop_cycle": "cycler('color', ['0072b2', 'd55e00', '009e73', 'cc79a7'])"}  # fmt: skip
_RIVAL, _REAL, _FIXED = "#e69f00", "#0072b2", "#8cc4e6"  # distinct also for the colour-blind


def draw(found: Results, stem: pathlib.Path) -> list[pathlib.Path]:
    """Draws the figure of a comparison or a sweep into STEM.svg and STEM.png.

    Returns the paths written: none without matplotlib (pip install 'tower_train[plots]'), or for results that are too
    noisy. Raises ConfigError if they cannot be written.
    """
    if not importlib.util.find_spec("matplotlib"):
        return []
    import matplotlib

    paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
    with matplotlib.rc_context(_STYLE):
        figure = _sweep(found) if found.parts else _comparison(found)
        if not figure:
            return []
        try:
            for path in paths:
                figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise errors.ConfigError(
                f"{path} cannot be written ({error.strerror}). Make room, or copy {stem}.json to where there is some, "
                "and run the benchmark with --redraw=FILE."
            ) from None
    return paths


def _comparison(found: Results):
    """Draws a panel of bars per arithmetic, or one for all if one has few, and one of curves over tower counts."""
    rows = found.rows()
    bars = [row for row in rows if not row.side.is_ceiling]
    if not bars or results.too_noisy(rows):
        return None
    panels: dict[str | None, list[Row]] = {}
    for row in bars:
        panels.setdefault(row.side.dtype, []).append(row)
    if min(map(len, panels.values())) < _FEWEST_BARS:
        panels = {None: bars}
    scaling = scaling_curves(bars)
    figure = _figure(1.9 + 0.6 * len(panels) + 0.22 * len(bars))
    grid = figure.add_gridspec(len(panels), 2 if scaling else 1, height_ratios=[len(p) + 1 for p in panels.values()],
                               width_ratios=[3, 2] if scaling else [1])  # fmt: skip
    most = 1.04 * max(max(row.high, row.ceiling or 0) for row in bars)
    for number, (dtype, panel) in enumerate(panels.items()):
        axis = figure.add_subplot(grid[number, 0], xlim=(0, most), title=f"Training{f' in {dtype}' if dtype else ''}")
        _draw_bars(axis, panel, dtype)
    axis.set_xlabel("examples/sec (written beside the bars)")
    _legend(figure, bars)
    if scaling:
        axis = figure.add_subplot(grid[:, 1], title="Scaling over towers")
        _draw_curves(axis, scaling, found.on_gpus)
        axis.set_xlabel("towers")
    _caption(figure, found, [
        f"{found.options.batch_size} examples a step, {found.options.num_rounds} rounds of "
        f"{found.options.seconds_each:g} s: medians, with whiskers from quartile to quartile.",
        *_about_ceilings(bars, found.about["flops_per_example"]), *([_about_scaling(found)] if scaling else []),
    ])  # fmt: skip
    return figure


def _sweep(found: Results):
    """Draws a panel for each curve with enough points."""
    curves = [(part, curve) for part, curve in found.curves() if len(curve) >= _FEWEST_POINTS]
    if not curves or results.too_noisy([row for _, curve in curves for row in curve.values()]):
        return None
    figure = _figure(4.2)
    explained = []
    for axis, (part, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        is_over_towers = part["axis"] == "towers"
        _draw_curves(axis, {"measured": curve}, found.on_gpus, is_over_towers)
        explained += [_about_scaling(found)] if is_over_towers else []
        axis.set(xlabel=part["axis"], title=part["title"])
    _caption(figure, found, [
        f"{found.options.num_rounds} rounds of {found.options.seconds_each:g} s in float32: medians, with whiskers "
        "from quartile to quartile.", *explained,
    ])  # fmt: skip
    return figure


def _draw_bars(axis, rows: Sequence[Row], dtype: str | None) -> None:
    places, speeds, colors = range(len(rows), 0, -1), [row.per_sec for row in rows], [_color(row) for row in rows]
    whiskers = {"ecolor": "black", "elinewidth": 1.2}
    axis.barh(places, speeds, height=0.7, color=colors, xerr=_spreads(rows), error_kw=whiskers)
    for place, row in zip(places, rows, strict=True):
        axis.annotate(f"{row.per_sec:,.0f}", (1, place), (36, 0), axis.get_yaxis_transform(), "offset points",
                      va="center", ha="right")  # fmt: skip
        if row.ceiling:
            axis.plot([row.ceiling] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axis.set_yticks(places, [row.side.title.removesuffix(f", {dtype}") for row in rows])
    axis.set_ylim(0.4, len(rows) + 0.6)


def _spreads(rows: Iterable[Row]) -> list[list[float]]:
    """Returns the distances of the quartiles below and above the medians."""
    return [[row.per_sec - row.low for row in rows], [row.high - row.per_sec for row in rows]]


def _color(row: Row) -> str:
    if row.side.kind != "trainer":
        return _RIVAL
    return _FIXED if row.side.settings["is_fixed"] else _REAL


def _legend(figure, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {_RIVAL: "others", _REAL: "tower_train, real data", _FIXED: "tower_train, one fixed batch"}
    shown = [_color(row) for row in rows]
    handles = [Patch(color=color, label=name) for color, name in names.items() if color in shown]
    if any(row.ceiling for row in rows):
        ceiling = dict(marker="|", markersize=11, markeredgewidth=2, linestyle="", color="black")
        handles.append(Line2D([], [], label="ceiling: matrix products alone", **ceiling))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def _draw_curves(axis, curves: Mapping[str, Mapping[int, Row]], on_gpus: bool, is_over_towers: bool = True) -> None:
    """Draws {label: {x: row}} over powers of two or so; curves over towers with perfect scaling."""
    for label, curve in curves.items():
        xs, speeds = list(curve), [row.per_sec for row in curve.values()]
        color = axis.errorbar(xs, speeds, _spreads(curve.values()), fmt="o-", markersize=4, capsize=2, label=label)[
            0
        ].get_color()
        if is_over_towers:
            perfect = perfect_scaling({x: row.per_sec for x, row in curve.items()}, on_gpus)
            axis.plot(xs, perfect, ":", color=color, label="perfect scaling" if len(curves) == 1 else None)
    if is_over_towers:
        axis.legend(loc="lower left")
    ticks = sorted(set().union(*curves.values()))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{x:,}" if x >= 10_000 else str(x) for x in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * axis.dataLim.ymax)
    axis.set_ylabel("examples/sec")


def scaling_curves(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Returns {inputs and dtype: {towers: row}} of all sides of tower_train with enough tower counts."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        start = f"{systems.TRAINER}, {systems.count_of(row.side.towers, 'tower')}, "
        if row.side.title.startswith(start):
            found.setdefault(row.side.title.removeprefix(start), {})[row.side.towers] = row
    return {name: curve for name, curve in found.items() if len(curve) >= _FEWEST_POINTS}


def perfect_scaling(by_towers: Mapping[int, float], on_gpus: bool) -> list[float]:
    """Returns the throughput at each tower count if more towers cost nothing, from that of the fewest.

    It grows with the number of GPUs. For logical CPU devices it is constant: one tower keeps all cores busy.
    """
    fewest = min(by_towers)
    return [by_towers[fewest] * (towers / fewest if on_gpus else 1) for towers in by_towers]


def _about_scaling(found: Results) -> str:
    if found.on_gpus:
        return "Dotted, perfect scaling: twice the GPUs train twice the examples a second."
    return (
        f"Dotted, perfect scaling: the towers share the same {found.machine['cores']} cores, which one tower keeps "
        "busy, so that more of them can at best cost nothing."
    )


def _about_ceilings(rows: Sequence[Row], flops_per_example: float | None) -> list[str]:
    ceiled = [row for row in rows if row.ceiling]
    if not ceiled:
        return []
    found = [
        "The ceiling is the rate if a step were nothing but matrix products, as fast as this machine computes large "
        f"ones of the same arithmetic: {flops_per_example / 1e6:.1f} MFLOP an example are counted in the plain network."
    ]
    if any(row.per_sec > row.ceiling for row in ceiled):
        found.append("Bars go beyond it where convolutions are computed with fewer products than are counted.")
    return found


def _caption(figure, found: Results, sentences: Sequence[str]) -> None:
    """Writes sentences, and the data, the machine and the date, below the panels."""
    packages = ", ".join(f"{name} {version}" for name, version in found.machine["versions"].items())
    machine = report.machine_in_words(found.machine, found.about)
    lines = textwrap.wrap(" ".join(sentences), _LETTERS_A_LINE)
    lines += textwrap.wrap(
        f"{machine}; {found.about['data'].partition(' (')[0]}; {packages}; {found.date}.", _LETTERS_A_LINE
    )
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8)


def _figure(height: float):
    """Returns a new figure, so many inches high, that needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0.02, 0, 0.96, 1))  # fonts of an SVG's reader may be wider than those here
    return figure
