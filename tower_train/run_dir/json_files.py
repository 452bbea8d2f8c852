"""The JSON files of a run: their fields and types, and one line about a file that is something else."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from tower_train import errors
from tower_train.config import Config
from tower_train.console import one_line
from tower_train.options import declare

RUN, RESULT, BEST, METRICS = "run.json", "result.json", "best.json", "metrics.jsonl"
_SCORE = {"step": int, "examples": int, "value": float}
_OPTIONS = Config.__dataclass_fields__
# The types of all fields that are read, an option's by its declaration; one with a ? may be missing, as in older runs.
_FIELDS = {
    RUN: {
        "workload": str, "dataset": str, "data": {"name": str, "fingerprint?": str},
        "config": {
            "workload": _OPTIONS["data_dir"],  # also text or null: a run may have no import path
            **{name: _OPTIONS[name] for name in ("data_dir", "seed", "dtype", "moving_average_decay")},
            **{f"{name}?": _OPTIONS[name] for name in ("deterministic", "tensor_float_32")},
        },
        "workload_options?": dict, "global_batch?": int, "random_numbers?": {"by_example?": list}, "versions?": dict,
        "drawing?": str,
    },
    RESULT: {"step?": int, "evaluation?": {"step": int}},
    BEST: {"metric": str, "mode?": str, "better?": str, "best": _SCORE, "last": _SCORE},
}  # fmt: skip
_NOUNS = {dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number"}


def refuse_others(path: pathlib.Path) -> None:
    """Raises RunError for a FIFO, a directory or a device at a path, on which a reader might hang."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise errors.RunError(f"{one_line(path)} is no file, and so not of a run. Move it away.")


def read(path: pathlib.Path) -> dict:
    """Returns a JSON file's content, empty if there is no such file; RunError if it is not JSON, or a field has a wrong
    type."""
    refuse_others(path)
    try:
        content = json.loads(path.read_bytes())
        _check_type(content, _FIELDS.get(path.name, dict))
        if path.name == RUN:
            renamed = declare.new_names(dataclasses.fields(Config))
            content["config"] = {renamed.get(name, name): value for name, value in content["config"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.RunError(f"{one_line(path)} cannot be read ({reason}). Move it away or mend it.") from None
    return content


def encoded(path: pathlib.Path, content: dict) -> bytes:
    """Returns the bytes of a JSON file; RunError if a field has a wrong type."""
    try:
        _check_type(content, _FIELDS.get(path.name, dict))
    except ValueError as error:
        raise errors.RunError(f"{one_line(path)} cannot be written ({error}). Mend the workload.") from None
    return json.dumps(content, indent=2).encode() + b"\n"


def step_of(line: bytes) -> int | None:
    """Returns the step of a line of metrics.jsonl; None if it is no such line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _check_type(value: Any, kind: Any, name: str = "") -> None:
    """Raises ValueError, with the field's name, if a JSON value is not of a type of _FIELDS."""
    if isinstance(kind, dataclasses.Field):
        try:
            if not (value is None and kind.default is None):
                declare.checked(kind, value)
        except errors.ConfigError:
            raise ValueError(f"{name} is {_shown(value)}, and must be {declare.allowed(kind)}") from None
        return
    plain = kind if kind in (str, int, float, list) else dict
    if not isinstance(value, (int, float) if plain is float else plain) or isinstance(value, bool):
        raise ValueError(f"{name or 'its content'} is {_shown(value)}, and must be {_NOUNS[plain]}")
    for key, field_type in kind.items() if isinstance(kind, dict) else ():
        field = key.rstrip("?")
        if field in value:
            _check_type(value[field], field_type, f"{name}.{field}".lstrip("."))
        elif field == key:
            raise ValueError(f"{name}.{field} is missing".lstrip("."))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
