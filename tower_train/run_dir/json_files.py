"""The JSON files of a run, and one line about a file that is something else."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tower_train import errors, files
from tower_train.console import one_line

RUN, RESULT, BEST, METRICS = "run.json", "result.json", "best.json", "metrics.jsonl"
OF_EVALUATION = "val_"  # the beginning of the names of an evaluation's metrics, as Keras has them
# {file: fields without which it is of no use}
_NEEDED = {RUN: ("workload", "dataset", "data", "config", "devices"), BEST: ("metric", "mode", "best", "last")}


def read(path: pathlib.Path) -> dict:
    """Returns a JSON file's content, empty if there is no such file; RunError if it is something else."""
    try:
        content = json.loads(files.read_in_run(path))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if missing := [name for name in _NEEDED.get(path.name, ()) if name not in content]:
            raise ValueError(f"{missing[0]} is missing")
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
