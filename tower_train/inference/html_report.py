"""The report of a run as one HTML file, without network, script or matplotlib."""

import base64
import contextlib
import html
from collections.abc import Iterable, Mapping, Sequence

from tower_train import errors
from tower_train.config import Config
from tower_train.inference import curves
from tower_train.inference.hardest import Hard
from tower_train.options import as_text
from tower_train.run_dir import directory, json_files

MARK = b"<meta name=generator content=tower_train>"  # of a page that was written here
_HEAD = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=generator content=tower_train><title>TITLE</title>
<meta name=viewport content='width=device-width, initial-scale=1'><style>
:root { color-scheme: light dark; --first: #2b8cc4; --second: #d5762f;
  --soft: color-mix(in srgb, CanvasText 65%, Canvas); --line: color-mix(in srgb, CanvasText 20%, Canvas); }
body { max-width: 60rem; margin: auto; padding: 1rem; background: Canvas; font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } p, small { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem .15rem 0; font-size: .9rem; text-align: left; border-bottom: 1px solid var(--line); }
.matrix :is(th, td) { padding: .15rem .4rem; text-align: right; white-space: nowrap; }
.matrix td { background: color-mix(in srgb, var(--first) calc(var(--share) * 60%), transparent); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(var(--least), 1fr)); gap: .8rem; }
.grid > * { border: 1px solid var(--line); border-radius: 6px; padding: .5rem; font-size: .85rem; }
.grid img { display: block; margin-bottom: .3rem; } .first { color: var(--first); } .second { color: var(--second); }
svg { display: block; width: 100%; height: 9rem; margin: .3rem 0; overflow: visible; }
polyline { fill: none; stroke: currentcolor; stroke-width: 2px; vector-effect: non-scaling-stroke; }
</style><h1>TITLE</h1>"""
_MOST_CLASSES, _MOST_NAMES, _MOST_POINTS = 30, 100, 400
_FIELDS = "devices", "num_parameters", "global_batch"  # of run.json
_SPLITS = {"evaluation": "test", "validation": "validation", "train_evaluation": "training"}


def render(run_dir: directory.RunDirectory, hard: tuple[int, str, Sequence[Hard]] | str) -> str:
    """Returns the report of a run, also of one that trains, from its files.

    Args:
      run_dir: the run's.
      hard: (examples looked at, their name, those of the highest losses); or why there are none.
    """
    run, result, best = (run_dir.read(name) for name in (directory.RUN, directory.RESULT, json_files.BEST))
    lists = {}
    with contextlib.suppress(errors.RunError):  # no log line yet
        lists = curves.history(str(run_dir.path))
    title = f"{_text(run['workload'])}: {_text(run_dir.path.absolute().name)}"
    state = f"{_state(run_dir, result, lists)} Started {run.get('started')}."
    page = [_HEAD.replace("TITLE", title), _paragraph(state)]
    for name, content in {
        "Results": _results(result, best, lists),
        "Curves": _curves(lists),
        "Confusion matrix": _confusion(result),
        "Highest losses": _paragraph(hard) if isinstance(hard, str) else _hard(*hard),
        "Data": _data(run["data"]),
        "Several towers and one": _paragraph(run.get("compared_with_one_tower", {}).get("line", "")),
        "Options": _options(run),
        "Environment": _table([*run.get("versions", {}).items(), *((n, as_text(run[n])) for n in _FIELDS if n in run)]),
    }.items():
        page += [f"<h2>{name}</h2>", content] if content else []
    return "".join(page)


def _text(value) -> str:
    return html.escape(str(value))


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>" if text else ""


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
    if not run_dir.has_ended():
        return f"Interrupted: {at}."
    stopped_by = result.get("stopped_by")
    return f"Done: {at}." if stopped_by == "last step" else f"Stopped by {stopped_by}: {at}."


def _results(result: Mapping, best: Mapping, lists: Mapping) -> str:
    rows = []
    for evaluation, split in ((result[name], split) for name, split in _SPLITS.items() if name in result):
        count = f"{evaluation['num_examples']} {split}"
        for metric, value in evaluation["metrics"].items():
            interval = "" if value["low"] is None else f"{value['low']:.3f} to {value['high']:.3f}"
            rows.append([metric, _number(value["mean"]), interval, count, evaluation["step"]])
    if not rows and "val_step" in lists:  # it trains, and has no result yet
        last = {name[4:]: lists[name][-1] for name in ["val_loss", *curves.metric_names(lists)]}
        rows = [[name, _number(value), "", "", lists["val_step"][-1]] for name, value in last.items()]
    if best:
        rows.append([f"best {best['metric']}", _number(best["best"]["value"]), "", "", best["best"]["step"]])
    text = _table(rows, ["metric", "value", "95 % interval", "of examples", "step"])
    return text or _paragraph("No evaluation yet: --eval_at_end and --eval_every_steps make some.")


def _curves(lists: Mapping[str, list]) -> str:
    epochs = {"": lists.get("epoch", []), "train_": lists.get("val_epoch", []), "val_": lists.get("val_epoch", [])}
    figures = []
    for name in ["loss", *(name[4:] for name in curves.metric_names(lists))]:
        kinds = ("" if name == "loss" else "train_", "val_")
        figures.append(_figure(name, *((epochs[kind], lists.get(kind + name, [])) for kind in kinds)))
    return f"<div class=grid style='--least:17rem'>{''.join(figures)}</div>" if any(figures) else ""


def _figure(name: str, *curves: tuple[Sequence[float], Sequence[float | None]]) -> str:
    """Draws a curve of training and one of evaluations over epochs."""
    known = [[(x, y) for x, y in zip(xs, ys, strict=False) if y is not None] for xs, ys in curves]
    ys, last = [y for pairs in known for _, y in pairs], max([x for pairs in known for x, _ in pairs], default=0) or 1
    if not ys:
        return ""
    low, high = min(ys), max(ys)
    legend = lines = ""
    for kind, what, pairs in zip(("first", "second"), ("training", "evaluation"), known, strict=True):
        if pairs:
            pairs = [*pairs[:: -(-len(pairs) // _MOST_POINTS)], pairs[-1]]  # one point twice is drawn as a dot
            points = [f"{300 * x / last:.1f},{99 - 98 * (y - low) / (high - low or 1):.1f}" for x, y in pairs]
            lines += f"<polyline class={kind} points='{' '.join(points)}' />"
            legend += f" <span class={kind}>{what}</span>"
    svg = f"<svg viewBox='0 0 300 100' preserveAspectRatio=none>{lines}</svg>"
    below = f"0 to {_number(last)} epochs, {_number(low)} to {_number(high)}"
    return f"<div><strong>{_text(name)}</strong>{legend}{svg}<small>{below}</small></div>"


def _confusion(result: Mapping) -> str:
    evaluation = next((each for name in _SPLITS if (each := result.get(name)) and each.get("confusion")), None)
    if not evaluation or len(evaluation["class_names"]) > _MOST_CLASSES:
        return ""
    matrix, names = evaluation["confusion"], evaluation["class_names"]
    head, body = "".join(f"<th>{_text(name[:24])}" for name in names), ""
    for name, row in zip(names, matrix, strict=True):
        cells = "".join(f"<td style='--share:{count / (sum(row) or 1):.2f}'>{count}" for count in row)
        body += f"<tr><th>{_text(name[:24])}{cells}"
    caption = _paragraph(f"Rows: true classes, columns: predicted ones, of {evaluation['data']}.")
    return f"{caption}<div class=wide><table class=matrix><tr><th>{head}{body}</table></div>"


def _hard(looked_at: int, of: str, examples: Sequence[Hard]) -> str:
    cells = []
    for each in examples:
        shown = each.picture and f"<img alt='' src='data:image/png;base64,{base64.b64encode(each.picture).decode()}'>"
        cells.append(f"<div>{shown or ''}{_text(each.words)}<br><small>loss {_number(each.loss)}</small></div>")
    pictures = f"<div class=grid style='--least:8.5rem'>{''.join(cells)}</div>"
    return _paragraph(f"Of {looked_at} examples of {of}.") + pictures


def _data(data: Mapping) -> str:
    names, counts = data.get("class_names") or [], data.get("class_counts") or []
    rows = [(name, data.get(name)) for name in ("name", "num_examples", "fingerprint", "notice") if data.get(name)]
    classes = _table([[name, *counts[i : i + 1]] for i, name in enumerate(names[:_MOST_NAMES])])
    many = f"{len(names)} classes{f', the first {_MOST_NAMES}' if len(names) > _MOST_NAMES else ''}"
    return _table(rows) + (f"<details><summary>{many}</summary>{classes}</details>" if names else "")


def _options(run: Mapping) -> str:
    usual = {name: as_text(field.default) for name, field in Config.__dataclass_fields__.items()}
    given, rest = [], []
    for name, value in {**run["config"], **run.get("workload_options", {})}.items():
        (rest if as_text(value) == usual.get(name) else given).append((f"--{name}", as_text(value)))
    return f"{_table(given)}<details><summary>with their default values</summary>{_table(rest)}</details>"
