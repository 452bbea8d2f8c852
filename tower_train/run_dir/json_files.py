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
_FIELDS = {  # the types of all fields that are read; one with a ? may be missing, as in older runs
    RUN: {
        "workload": str, "dataset": str, "data": {"name": str, "fingerprint?": str}, "config": Config,
        "workload_options?": dict, "global_batch?": int, "random_numbers?": dict, "versions?": dict, "drawing?": str,
    },
    RESULT: {"step?": int, "evaluation?": {"step": int}},
    BEST: {"metric": str, "better?": str, "best": _SCORE, "last": _SCORE},
}  # fmt: skip
_NOUNS = {dict: "an object", str: "text", int: "a whole number", float: "a number"}
_NEEDED_OPTIONS = ("workload", "data_dir", "seed", "dtype", "moving_average_decay")  # by evaluation


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
    plain = kind if kind in (str, int, float) else dict
    if not isinstance(value, (int, float) if plain is float else plain) or isinstance(value, bool):
        raise ValueError(f"{name or 'its content'} is {_shown(value)}, and must be {_NOUNS[plain]}")
    if kind is Config:
        _check_options(value)
    elif isinstance(kind, dict):
        for key, field_type in kind.items():
            field = key.rstrip("?")
            if field in value:
                _check_type(value[field], field_type, f"{name}.{field}".lstrip("."))
            elif field == key:
                raise ValueError(f"{name}.{field} is missing".lstrip("."))


def _check_options(values: dict[str, Any]) -> None:
    """Raises ValueError for an impossible value of an option that a later start compares or needs."""
    for field in dataclasses.fields(Config):
        name, is_needed = field.name, field.name in _NEEDED_OPTIONS
        if name not in values and is_needed:
            raise ValueError(f"config.{name} is missing")
        may_be_null = field.default is None or name == "workload"  # of a run without an import path
        if name not in values or (values[name] is None and may_be_null):
            continue
        if is_needed or field.metadata["resume"] != "free":
            try:
                declare.checked(field, values[name])
            except errors.ConfigError:
                allowed = declare.allowed(field)
                raise ValueError(f"config.{name} is {_shown(values[name])}, and must be {allowed}") from None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
