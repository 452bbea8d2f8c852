"""The JSON files of a run: their fields and types, and one line about a file that is something else."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tower_train import errors, files
from tower_train.config import Config
from tower_train.console import one_line

RUN, RESULT, BEST, METRICS = "run.json", "result.json", "best.json", "metrics.jsonl"
OF_EVALUATION = "val_"  # the beginning of the names of an evaluation's metrics, as Keras has them
_NOUNS = {
    str: "text",
    str | None: "text or null",
    int: "a whole number",
    int | float: "a number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    bool | None: "true, false or null",
}
_DTYPES = Config.__dataclass_fields__["dtype"].metadata["allowed"]
_SCORE = {"step": int, "examples": int, "value": int | float}
# {file: {field: type, or values}} of all fields that are read; one with a ? may be missing.
_FIELDS = {
    RUN: {
        "workload": str,
        "workload_file?": str | None,
        "dataset": str,
        "data.name": str,
        "data.fingerprint?": str,
        "data.class_names?": list,
        "config.workload": str | None,
        "config.data_dir": str | None,
        "config.seed": int,
        "config.dtype": _DTYPES,
        "config.ema": int | float,
        "config.deterministic?": bool,
        "config.tensor_float_32?": bool | None,
        "workload_options?": dict,
        "global_batch?": int,
        "random_numbers.by_example?": list,
        "versions?": dict,
        "started?": str,
        "devices": list,
        "config.worker_hosts": str | None,
        "config.accumulate_steps": int,
        "config.variable_update": str,
        "config.batch_norm": str,
        "config.validation_fraction?": int | float,
        "config.eval_every_steps?": int,
    },
    RESULT: {"step?": int, "evaluation.step?": int, "validation.step?": int, "train_evaluation.step?": int},
    BEST: {
        "metric": str,
        "mode": str,
        **{f"{which}.{field}": kind for which in ("best", "last") for field, kind in _SCORE.items()},
    },
}


def read(path: pathlib.Path) -> dict:
    """Returns a JSON file's content, empty if there is no such file; RunError if it is not JSON, or a field has a wrong
    type."""
    try:
        content = json.loads(files.read_in_run(path))
        _check_types(content, _FIELDS.get(path.name, {}))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise errors.RunError(
            f"{one_line(path)} cannot be read ({errors.reason(error)}). Move it away or mend it."
        ) from None
    return content


def record(line: bytes) -> dict | None:
    """Returns the record in a line of metrics.jsonl; None if it holds none: {"step": 5, "epoch": 0.5, ...}, all numbers
    or null."""
    try:
        content = json.loads(line)
        numbers = (*content.values(), content["step"], content["epoch"])
        if type(content["step"]) is int and all(each is None or abs(each) < 1e300 for each in numbers):
            return content
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass
    return None


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Returns whether a record of metrics.jsonl is of an evaluation, not of the training."""
    return any(name.startswith(OF_EVALUATION) for name in record)


def _check_types(content: Any, fields: Mapping[str, Any]) -> None:
    """Raises ValueError, with the field's name, if a JSON value is not of its type."""
    _check_type("its content", content, dict)
    for path, kind in fields.items():
        value, names = content, path.rstrip("?").split(".")
        for i, name in enumerate(names):
            if name not in value and path.endswith("?"):
                break
            here = ".".join(names[: i + 1])
            if name not in value:
                raise ValueError(f"{here} is missing")
            value = value[name]
            _check_type(here, value, kind if i == len(names) - 1 else dict)


def _check_type(name: str, value: Any, kind: Any) -> None:
    if isinstance(kind, tuple):
        is_right, allowed = value in kind, f"one of {', '.join(kind)}"
    else:
        is_bool = isinstance(value, bool) and kind in (int, int | float)  # Python takes it for a number
        is_right, allowed = isinstance(value, kind) and not is_bool, _NOUNS[kind]
    if not is_right:
        text = json.dumps(value, default=repr)
        raise ValueError(f"{name} is {text if len(text) <= 60 else f'{text[:57]}...'}, and must be {allowed}")
