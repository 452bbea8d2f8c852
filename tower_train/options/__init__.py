"""Options: their declaration, from which the command line, the checks and the arguments of the Python API come.

An options class is a frozen dataclass of fields made by `option`; its base `Options` checks all values, with the same
messages for the command line and for Python. No TensorFlow here, so that --help answers at once.
"""

import dataclasses
import math
import operator
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

from tower_train import errors
from tower_train.options import renamed

TOWERS, MACHINES, DATA, TRAINING = "Towers and devices", "Several machines", "Data", "Training"
LEARNING_RATE, OPTIMIZER, ARITHMETIC = "Learning rate", "Optimizer", "Arithmetic and repeatability"
RUN, FAULTS, REPORTS = "The run and its files", "Faults", "Reports and evaluations"
_BOUNDS = {
    "minimum": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "below": ("below", operator.lt),
}
_MOST = 2**63 - 1  # TensorFlow has no larger whole number


def option(
    default, help, group, *, choices=(), minimum=None, above=None, maximum=None, below=None, resume="free", needs=(),
    instead_of=(), was=None,
):  # fmt: skip
    """Declares one field of an options class.

    Args:
      default: the value if the user gives none; None if it follows from other options (the help says how).
      help: text for --help, with the unit.
      group: its heading in --help.
      choices: the allowed values, if they can be listed.
      minimum, above, maximum, below: bounds: value >= minimum, > above, <= maximum, < below. A whole number has at
        most 64 bits in any case.
      resume: whether a run may go on with another value: 'same' (no, unless --override), 'note' (yes, with a log line)
        or 'free'.
      needs: (another option, the values of it that give this one a use), by default any true value. E.g.
        ("optimizer", "momentum", "muon").
      instead_of: (another option that says the same, what both say). Only one of them may be given.
      was: the old name, which still works and says once what it is called now.
    """
    metadata = dict(locals())  # all arguments
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options(metaclass=renamed.TakesOldNames):
    """Base of the options classes, which checks all values when it is created.

    Raises:
      ConfigError: a value of the wrong type or out of bounds, or options that exclude or need each other.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, checked(field, value))
        _check_relations(self)
        self.check()

    def check(self):
        """Checks rules between options that they cannot declare."""


def without_useless(
    options_class: type[Options], recipe: Mapping[str, Any], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a recipe {name: value} without the options that those chosen by the user make useless."""
    fields = dataclasses.fields(options_class)
    kept = renamed.with_new_names(recipe, renamed.new_names(fields))
    for field in fields:
        if not _is_of_use(field, chosen):
            kept.pop(field.name, None)
        for other in field.metadata["instead_of"][:1]:
            for useless, taken in ((field.name, other), (other, field.name)):
                if chosen.get(taken):
                    kept.pop(useless, None)
    return kept


def parse(field: dataclasses.Field, text: str):
    """Reads an option's value from the command line; ConfigError if its type or size is not allowed."""
    kind = kind_of(field)
    try:
        if kind is bool:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            value = tuple(map(int, text.split(","))) if kind is tuple else kind(text)
    except (ValueError, KeyError):
        raise _refusal(field, text) from None
    return checked(field, value)


def kind_of(field: dataclasses.Field) -> type:
    """Returns bool, int, float, str or tuple."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    return typing.get_origin(kinds[0]) or kinds[0]


def allowed(field: dataclasses.Field) -> str:
    """Describes the allowed values of an option in words."""
    about = field.metadata
    if about["choices"]:
        return "one of " + ", ".join(about["choices"])
    noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text",
            tuple: "whole numbers separated by commas, each"}[kind_of(field)]  # fmt: skip
    bounds = [f"{word} {about[name]}" for name, (word, _) in _BOUNDS.items() if about[name] is not None]
    return " ".join([noun, " and ".join(bounds)]).strip()


def checked(field: dataclasses.Field, value):
    """Returns an option's value, converted to its type; ConfigError if its type or size is not allowed."""
    kind = kind_of(field)
    if kind is float and type(value) is int and abs(value) < 2**1000:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    parts, part_type = (value, int) if isinstance(value, tuple) else ((value,), kind)
    is_of_type = isinstance(value, kind) and all(isinstance(part, part_type) for part in parts)
    if not is_of_type or any(isinstance(part, bool) for part in parts) != (kind is bool):
        raise _refusal(field, repr(value))
    if any(isinstance(part, int) and abs(part) > _MOST for part in parts):
        raise _refusal(field, as_text(value)[:100], ", in 64 bits")
    if not parts or not all(_in_bounds(part, field.metadata) for part in parts):
        raise _refusal(field, as_text(value))
    return value


def _is_of_use(field: dataclasses.Field, values: Mapping[str, Any]) -> bool:
    """Returns whether the values of options, as far as they are known, meet an option's `needs`."""
    other, *choices = field.metadata["needs"] or (None,)
    return other not in values or (values[other] in choices if choices else bool(values[other]))


def _check_relations(options: Options) -> None:
    """Checks `needs` and `instead_of`. An option with its default value counts as not given."""
    values = vars(options)
    for field in dataclasses.fields(options):
        shown = _on_command_line(field.name, values[field.name])
        if values[field.name] != field.default and not _is_of_use(field, values):
            other, *choices = field.metadata["needs"]
            if not choices:
                raise errors.ConfigError(f"{shown} needs --{other}. Give that too.")
            raise errors.ConfigError(f"{shown} is for --{other}={' or '.join(choices)}, not for {values[other]}.")
        if field.metadata["instead_of"]:
            other, what = field.metadata["instead_of"]
            if values[field.name] and values[other]:
                both = f"{_on_command_line(other, values[other])} and {shown}"
                raise errors.ConfigError(f"{both} both say {what}. Give one of them.")


def _on_command_line(name: str, value) -> str:
    return f"--{name}" if value is True else f"--{name}={as_text(value)}"


def _in_bounds(value, about) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if about["choices"]:
        return value in about["choices"]
    return all(about[name] is None or holds(value, about[name]) for name, (_, holds) in _BOUNDS.items())


def _refusal(field: dataclasses.Field, received: str, limit: str = "") -> errors.ConfigError:
    return errors.ConfigError(f"--{field.name}={received}: it must be {allowed(field)}{limit}.")


def as_text(value) -> str:
    """Returns a value as the command line takes it."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)
