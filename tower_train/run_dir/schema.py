"""The fields of a run's JSON files and their types, checked when they are written and read.

Fields that are not declared are ignored, as nothing reads them.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from tower_train import errors
from tower_train.config import Config
from tower_train.measures import HIGHER, LOWER
from tower_train.options import declare, rules


class Mismatch(ValueError):
    """An impossible value of a field; the text names the field, the value and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Values of one kind: in words, and by a test."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, value: Any, name: str) -> None:
        """Raises Mismatch if the value of the field of this name is of another kind."""
        if not self.holds(value):
            raise Mismatch(f"{name or 'its content'} is {_shown(value)}, and must be {self.words}")


@dataclasses.dataclass(frozen=True)
class OrNull:
    """Null, or of a kind."""

    kind: Any

    def check(self, value: Any, name: str) -> None:
        if value is not None:
            self.kind.check(value, name)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list whose items are of a kind."""

    kind: Any

    def check(self, value: Any, name: str) -> None:
        _LIST.check(value, name)
        for i, item in enumerate(value):
            self.kind.check(item, f"{name}[{i}]")


@dataclasses.dataclass(frozen=True)
class MapOf:
    """An object whose values are of a kind, under any names."""

    kind: Any

    def check(self, value: Any, name: str) -> None:
        OBJECT.check(value, name)
        for key, item in value.items():
            TEXT.check(key, f"a name in {name}")
            self.kind.check(item, f"{name}.{key}")


@dataclasses.dataclass(frozen=True)
class Record:
    """An object with these fields, all but the optional ones required."""

    fields: Mapping[str, Any]
    optional: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, value: Any, name: str = "") -> None:
        OBJECT.check(value, name)
        for key, kind in {**self.fields, **self.optional}.items():
            full_name = f"{name}.{key}" if name else key
            if key in value:
                kind.check(value[key], full_name)
            elif key in self.fields:
                raise Mismatch(f"{full_name} is missing")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    try:  # paths may not be UTF-8; Python decodes their bytes as surrogates
        return isinstance(value, str) and b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_whole(value) and abs(value) < 2**1000)


OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
_LIST = Kind("a list", lambda value: isinstance(value, list | tuple))
TEXT = Kind("text without a zero byte or a lone surrogate", _is_text)
COUNT = Kind("a whole number from 0 to 2^63 - 1", lambda value: _is_whole(value) and 0 <= value < 2**63)
NUMBER = Kind("a number", _is_number)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
_OPTION = Kind(
    "text, a number, true or false, or a list of whole numbers",
    lambda value: isinstance(value, bool) or _is_text(value) or _is_number(value)
    or isinstance(value, list | tuple) and all(map(_is_whole, value)),
)  # fmt: skip


def _value_of(field: dataclasses.Field) -> Kind:
    """Returns the kind of the values of one of the trainer's options."""

    def holds(value):
        if value is None or (isinstance(value, str) and not _is_text(value)):
            return value is None and field.default is None
        try:
            declare.checked(field, value)
        except errors.ConfigError:
            return False
        return True

    return Kind(declare.allowed(field), holds)


def _are_algorithms(value: Any) -> bool:
    try:
        return _is_text(value) and bool(rules.parse_algorithms(value))
    except errors.ConfigError:
        return False


# The options that a start compares with those of the start before; and those that evaluation needs.
_OPTIONS = {field.name: _value_of(field) for field in dataclasses.fields(Config) if field.metadata["resume"] != "free"}
_OPTIONS["algorithms"] = Kind("auto, usual, the name of an algorithm, or SITE=NAME,...", _are_algorithms)
_DTYPES = [name for name in Config.__dataclass_fields__["dtype"].metadata["choices"] if name != "auto"]  # once resolved
_NEEDED = {name: _OPTIONS.pop(name) for name in ("seed", "moving_average_decay", "dtype")}
_NEEDED["dtype"] = Kind(f"one of {', '.join(_DTYPES)}", lambda value: value in _DTYPES)
_NEEDED |= {"workload": OrNull(TEXT), "data_dir": OrNull(TEXT)}

RUN = Record(
    {
        "workload": TEXT,
        "dataset": TEXT,
        "data": Record(
            {"name": TEXT}, {"num_examples": COUNT, "fingerprint": TEXT, "order": TEXT, "notice": OrNull(TEXT)}
        ),
        "config": Record(_NEEDED, _OPTIONS),
    },
    {
        "workload_options": MapOf(OrNull(_OPTION)),
        "global_batch": COUNT,
        "num_parameters": COUNT,
        "random_numbers": MapOf(ListOf(TEXT)),
        "drawing": TEXT,
        "devices": ListOf(TEXT),
        "versions": MapOf(TEXT),
        "started": TEXT,
    },
)
_BETTER = Kind(f"{HIGHER} or {LOWER}", lambda value: value in (HIGHER, LOWER))
_METRIC = Record({"mean": NUMBER}, {"low": OrNull(NUMBER), "high": OrNull(NUMBER), "better": OrNull(_BETTER)})
_EVALUATION = Record(
    {"step": COUNT},
    {
        "data": TEXT,
        "num_examples": COUNT,
        "weights": TEXT,
        "metrics": MapOf(_METRIC),
        "confusion": OrNull(ListOf(ListOf(COUNT))),
        "class_names": ListOf(TEXT),
        "seconds": NUMBER,
        "several_views": SWITCH,
        "most_confused": ListOf(Record({"true": TEXT, "predicted": TEXT, "count": COUNT})),
    },
)
RESULT = Record(
    {},
    {
        "train_dir": TEXT,
        "step": COUNT,
        "loss": OrNull(NUMBER),
        "examples_per_sec": OrNull(NUMBER),
        "seconds": NUMBER,
        "stopped_by": TEXT,
        "checkpoint": OrNull(TEXT),
        "data": TEXT,
        "notice": OrNull(TEXT),
        "failed_saves": COUNT,
        "skipped_steps": COUNT,
        "training_secs": OrNull(NUMBER),
        "evaluation": _EVALUATION,
        "train_evaluation": _EVALUATION,
    },
)
_SCORE = Record({"step": COUNT, "examples": COUNT, "value": NUMBER})
BEST = Record({"metric": TEXT, "best": _SCORE, "last": _SCORE}, {"better": _BETTER})
METRICS = Record(  # of a line
    {"step": COUNT},
    {name: OrNull(NUMBER)
     for name in ("examples", "epoch", "loss", "learning_rate", "examples_per_sec", "sec_per_batch", "loss_scale")},
)  # fmt: skip
