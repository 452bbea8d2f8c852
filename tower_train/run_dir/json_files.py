"""JSON files of a run, by their schemas."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

from tower_train import errors
from tower_train.console import one_line
from tower_train.run_dir import files, schema
from tower_train.workload_files import RUN_JSON as RUN

RESULT, BEST, METRICS = "result.json", "best.json", "metrics.jsonl"
_SCHEMAS = {RUN: schema.RUN, RESULT: schema.RESULT, BEST: schema.BEST}
_MOST_BYTES, _MOST_BYTES_OF_RESULT = 1 << 24, 1 << 30  # results of old runs may hold very large matrices


def read(path: pathlib.Path) -> dict:
    """Returns a JSON file's content, empty if there is no such file; RunError if it is not JSON, or a value
    impossible."""
    where = one_line(path)
    try:
        most_bytes = _MOST_BYTES_OF_RESULT if path.name == RESULT else _MOST_BYTES
        content = json.loads(files.read(path, most_bytes).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.RunError(f"{where} cannot be read ({reason}). Move it away or mend it.") from None
    if not isinstance(content, dict):
        raise errors.RunError(f"{where} holds no JSON object. Move it away or mend it.")
    with _mismatch_named(f"{where} cannot be used", "Move it away or mend it."):
        _check(path, content)
    return content


def encoded(path: pathlib.Path, content: dict) -> bytes:
    """Returns the bytes of a JSON file; RunError if a field has an impossible value."""
    with _mismatch_named(f"{one_line(path)} cannot be written", "Mend the workload."):
        _check(path, content)
    return json.dumps(content, indent=2).encode() + b"\n"


def step_of(line: bytes) -> int | None:
    """Returns the step of a line of metrics.jsonl; None if it is no such line."""
    try:
        record = json.loads(line.decode())
        schema.METRICS.check(record)
    except (ValueError, RecursionError):
        return None
    return record["step"]


@contextlib.contextmanager
def _mismatch_named(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except schema.Mismatch as error:
        raise errors.RunError(f"{what}: {error}. {advice}") from None


def _check(path: pathlib.Path, content: dict) -> None:
    if path.name in _SCHEMAS:
        _SCHEMAS[path.name].check(content)
