"""The report of a run as one HTML file, without network, script or matplotlib."""

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence

from tower_train import errors
from tower_train.config import Config
from tower_train.inference import curves
from tower_train.inference.hardest import Hard
from tower_train.options import as_text
from tower_train.run_dir import directory

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1d2126; --soft: #5c6670; --line: #d8dde3; --panel: #f4f6f8;
  --first: #0072b2; --second: #c4570a; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e4e7ea; --soft: #9aa4ae; --line: #333a42;
  --panel: #1e2329; --first: #56b4e9; --second: #f0a35e; } }
body { max-width: 60rem; margin: auto; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; color: var(--soft); } small, svg text { color: var(--soft); fill: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem .15rem 0; font-size: .9rem; text-align: left; border-bottom: 1px solid var(--line); }
.matrix :is(th, td) { padding: .15rem .4rem; text-align: right; white-space: nowrap; }
.matrix td { background: color-mix(in srgb, var(--first) calc(var(--share) * 60%), transparent); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(var(--least), 1fr)); gap: .8rem; }
.grid > * { background: var(--panel); border-radius: 6px; padding: .5rem; font-size: .85rem; }
.grid img { display: block; margin-bottom: .3rem; } svg text { font: 11px system-ui, sans-serif; }
polyline { fill: none; stroke-linecap: round; } .axis { stroke: var(--line); } .first { stroke: var(--first); }
.second { stroke: var(--second); stroke-width: 2; }
"""
_MOST_CLASSES, _MOST_NAMES, _MOST_POINTS = 30, 100, 400
_SPLITS = {"evaluation": "test", "validation": "validation", "train_evaluation": "training"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 340, 200, 48, 24, 28, 14  # of a figure, in its own units


def render(run_dir: directory.RunDirectory, hard: tuple[int, str, Sequence[Hard]] | str) -> str:
    """Returns the report of a run, also of one that trains, from its files.

    Args:
      run_dir: the run's.
      hard: (examples looked at, their name, those of the highest losses); or why there are none.
    """
    run, result, best = (run_dir.read(name) for name in (directory.RUN, directory.RESULT, directory.BEST))
    try:
        lists = curves.history(str(run_dir.path))
    except errors.RunError:  # no log line yet
        lists = {}
    title = f"{_text(run['workload'])}: {_text(run_dir.path.absolute().name)}"
    sections = {
        "Results": _results(result, best, lists),
        "Curves": _curves(lists),
        "Confusion matrix": _confusion(result),
        "Highest losses": _hard(hard),
        "Data": _data(run["data"]),
        "Several towers and one": _proof(run.get("compared_with_one_tower")),
        "Options": _options(run),
        "Environment": _environment(run),
    }
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, "
        f"initial-scale=1'><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{_text(_state(run_dir, result, lists))} Begun {_text(run.get('started'))}.</p>"
        + "".join(f"<h2>{name}</h2>{content}" for name, content in sections.items() if content)
    )


def _text(value) -> str:
    return html.escape(str(value))


def _table(rows: Sequence[Sequence], head: Iterable[str] = ()) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{_text(cell)}' for cell in row)}" for row in rows)
    return f"<div class=wide><table><tr>{''.join(f'<th>{cell}' for cell in head)}{cells}</table></div>" if rows else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _state(run_dir: directory.RunDirectory, result: Mapping, lists: Mapping) -> str:
    steps, epochs = (lists.get(name, []) + lists.get(f"val_{name}", []) for name in ("step", "epoch"))
    at = f"step {max(steps)}, after {max(epochs):.1f} epochs" if steps else "no step is logged yet"
    if run_dir.is_locked():
        return f"It trains, this is how far it was: {at}."
    return f"Ended by {result.get('stopped_by')}: {at}." if run_dir.has_ended() else f"Interrupted: {at}."


def _results(result: Mapping, best: Mapping, lists: Mapping) -> str:
    rows = [
        [
            metric,
            _number(value["mean"]),
            "" if value["low"] is None else f"{value['low']:.3f} to {value['high']:.3f}",
            f"{result[name]['num_examples']} {split}",
            result[name]["step"],
        ]
        for name, split in _SPLITS.items()
        for metric, value in result.get(name, {}).get("metrics", {}).items()
    ]
    if not rows and "val_step" in lists:  # it trains, and has no result yet
        rows = [[name, _number(lists[f"val_{name}"][-1]), "", "", lists["val_step"][-1]] for name in _metrics(lists)]
    if best:
        rows.append([f"best {best['metric']}", _number(best["best"]["value"]), "", "", best["best"]["step"]])
    text = _table(rows, ["metric", "value", "95 % interval", "of examples", "step"])
    return text or "<p>No evaluation yet: --eval_at_end and --eval_every_steps make some.</p>"


def _metrics(lists: Mapping[str, list]) -> list[str]:
    return [name[4:] for name in lists if name.startswith("val_") and name not in ("val_step", "val_epoch")]


def _curves(lists: Mapping[str, list]) -> str:
    epochs = {"": lists.get("epoch", []), "train_": lists.get("val_epoch", []), "val_": lists.get("val_epoch", [])}
    figures = []
    for name in dict.fromkeys(["loss", *_metrics(lists)]):
        first = "" if name == "loss" else "train_"
        figures.append(_figure(name, *((epochs[kind], lists.get(kind + name, [])) for kind in (first, "val_"))))
    return f"<div class=grid style='--least:17rem'>{''.join(figures)}</div>" if any(figures) else ""


def _figure(name: str, *curves: tuple[Sequence[float], Sequence[float | None]]) -> str:
    """Draws a curve of training and one of evaluations over epochs, on a logarithmic scale if values differ by more
    than 100 times."""
    known = [[(x, y) for x, y in zip(xs, ys, strict=False) if y is not None] for xs, ys in curves]
    ys, last = [y for pairs in known for _, y in pairs], max([x for pairs in known for x, _ in pairs], default=0) or 1
    if not ys:
        return ""
    is_log = 0 < 100 * min(ys) < max(ys)
    scaled = math.log10 if is_log else float
    low, high = scaled(min(ys)), scaled(max(ys))
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def down(y: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - y) / (high - low), 1)

    parts = []
    for y in (low + (high - low) * i / 3 for i in range(4)):
        parts.append(f"<line class=axis x1={_LEFT} x2={_WIDTH - _RIGHT} y1={down(y)} y2={down(y)} />")
        parts.append(_label(_LEFT - 6, down(y) + 4, _number(10**y if is_log else y), "end"))
    for i, (kind, what, pairs) in enumerate(zip(("first", "second"), ("training", "evaluation"), known, strict=True)):
        if pairs:
            pairs = [*pairs[:: -(-len(pairs) // _MOST_POINTS)], pairs[-1]]
            width = " style='stroke-width:6'" * (len(pairs) == 2)  # of a lone point
            points = " ".join(f"{_LEFT + (_WIDTH - _RIGHT - _LEFT) * x / last:.1f},{down(scaled(y))}" for x, y in pairs)
            parts.append(f"<polyline class={kind}{width} points='{points}' />")
            parts.append(_label(_WIDTH - _RIGHT - 75 * i, 17, what, "end", f"--soft:var(--{kind})"))
    parts += [_label(8, 17, name, "start", "--soft:var(--ink)"), _label(_LEFT, _HEIGHT - 7, "0")]
    parts.append(_label(_WIDTH - _RIGHT, _HEIGHT - 7, f"{_number(last)} epochs", "end"))
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}'>{''.join(parts)}</svg>"


def _label(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    return f"<text x={x} y={y} text-anchor={anchor} style='{style}'>{_text(text)}</text>"


def _confusion(result: Mapping) -> str:
    evaluation = next((each for name in _SPLITS if (each := result.get(name)) and each.get("confusion")), None)
    if not evaluation:
        return ""
    matrix, names = evaluation["confusion"], evaluation["class_names"]
    if len(names) > _MOST_CLASSES:
        wrong = sorted([(n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j], reverse=True)
        return _table([(n, names[i], names[j]) for n, i, j in wrong[:20]], ["examples", "of class", "taken for"])
    head = "".join(f"<th>{_text(name[:24])}" for name in names)
    body = "".join(
        f"<tr><th>{_text(name[:24])}" + "".join(f"<td style='--share:{n / (sum(row) or 1):.2f}'>{n}" for n in row)
        for name, row in zip(names, matrix, strict=True)
    )
    about = f"<p>Rows: true classes, columns: predicted ones, of {_text(evaluation['data'])}.</p>"
    return f"{about}<div class=wide><table class=matrix><tr><th>{head}{body}</table></div>"


def _hard(hard: tuple[int, str, Sequence[Hard]] | str) -> str:
    if isinstance(hard, str):
        return f"<p>{_text(hard)}</p>"
    looked_at, name, examples = hard
    cells = []
    for each in examples:
        picture = base64.b64encode(each.picture).decode() if each.picture else ""
        shown = (
            f"<img alt='' src='data:image/png;base64,{picture}'>" if picture else f"{_text(each.features[:200])}<br>"
        )
        became = "as predicted" if each.output == each.label else f"predicted {each.output[:80]}"
        words = f"{each.label[:80]}, {became}"
        cells.append(f"<div>{shown}{_text(words)}<br><small>loss {_number(each.loss)}</small></div>")
    about = f"<p>Of {looked_at} examples of {_text(name)}.</p>"
    return f"{about}<div class=grid style='--least:8.5rem'>{''.join(cells)}</div>"


def _data(data: Mapping) -> str:
    rows = [
        ["examples", data.get("num_examples")],
        *([name, data.get(name)] for name in ("name", "fingerprint", "notice")),
    ]
    names, counts = data.get("class_names") or [], data.get("class_counts") or []
    classes = [[name, *counts[i : i + 1]] for i, name in enumerate(names[:_MOST_NAMES])]
    more = f"<p>and {len(names) - _MOST_NAMES} more</p>" if len(names) > _MOST_NAMES else ""
    shown = f"<details><summary>{len(names)} classes</summary>{_table(classes)}{more}</details>" if names else ""
    return _table([row for row in rows if row[1] is not None]) + shown


def _proof(record: Mapping | None) -> str:
    if not record:
        return ""
    gap = record.get("largest_difference") or {}
    steps = f"{record.get('steps')} steps of {record.get('examples')} examples in {record.get('dtype')}"
    return _table(
        [
            ["compared", f"{record.get('towers')} towers with one, {steps}"],
            ["verdict", record.get("differs") or record.get("undecided") or "they trained what one tower trains"],
            ["largest difference", f"{_number(gap.get('relative'))} in {gap.get('of')}, step {gap.get('step')}"],
        ]
    )


def _options(run: Mapping) -> str:
    usual = {name: field.default for name, field in Config.__dataclass_fields__.items()}
    rows = {f"--{name}": as_text(value) for name, value in {**run["config"], **run.get("workload_options", {})}.items()}
    given = [row for row in rows.items() if row[1] != as_text(usual.get(row[0][2:]))]
    rest = _table([row for row in rows.items() if row not in given])
    return f"{_table(given)}<details><summary>with their default values</summary>{rest}</details>"


def _environment(run: Mapping) -> str:
    rows = [*run.get("versions", {}).items(), ("devices", ", ".join(map(str, run.get("devices", []))))]
    return _table([*rows, ("parameters", run.get("num_parameters")), ("global batch", run.get("global_batch"))])
