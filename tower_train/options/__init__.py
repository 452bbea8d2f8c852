"""Options: their declaration, which the command line, the checks and the arguments of the Python API are made of.

An options class is a frozen dataclass of fields made by `option`. No TensorFlow here, so that --help answers at once.
"""

import dataclasses
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from tower_train import errors

TOWERS, MACHINES, DATA, TRAINING = "Towers and devices", "Several machines", "Data", "Training"
AUGMENTATION = "Augmentation of training images"
LEARNING_RATE, OPTIMIZER, ARITHMETIC = "Learning rate", "Optimizer", "Arithmetic and repeatability"
RUN, FAULTS, REPORTS = "The run and its files", "Faults", "Reports and evaluations"
_BOUNDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
# {type of an option: types of its values}; numpy's numbers count too
_TYPES = {bool: bool, int: numbers.Integral, float: numbers.Real, str: (str, os.PathLike), tuple: ()}
_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "whole numbers separated by commas, each",
}


def option(default, help, group, allowed="", resume="", needs=()):
    """Declares one field of an options class.

    Args:
      default: the value if the user gives none; None if it follows from other options (the help says how).
      help: text for --help, with the unit.
      group: its heading in --help.
      allowed: a tuple of the allowed values, or their bounds as messages tell them: "at least 0 and below 1".
      resume: whether a run may go on with another value: 'same' (no, unless --override), 'note' (yes, with a log line)
        or 'free'. Empty: 'note' for augmentations, learning rate and optimizer, else 'free'.
      needs: (another option, the values of it that give this one a use), by default any true value. E.g.
        ("optimizer", "momentum", "muon"), or ("epochs", None) for an option that excludes --epochs.
    """
    resume = resume or ("note" if group in (AUGMENTATION, LEARNING_RATE, OPTIMIZER) else "free")
    metadata = dict(locals())  # all arguments
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of the options classes: ConfigError for a value that is not allowed, or options that do not go together."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, checked(field, value))
        _check_needs(self)
        self.check()

    def check(self):
        """Checks rules between options that they cannot declare."""


def without_useless(options_class, recipe: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe {name: value} without the options that those chosen by the user make useless."""
    fields = {field.name: field for field in dataclasses.fields(options_class)}
    return {name: value for name, value in recipe.items() if name not in fields or _is_of_use(fields[name], chosen)}


def parse(field: dataclasses.Field, text: str):
    """Reads an option's value from the command line; ConfigError if its type or size is not allowed."""
    kind = option_type(field)
    try:
        if kind is bool:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            value = tuple(map(int, text.split(","))) if kind is tuple else kind(text)
    except (ValueError, KeyError):
        raise _refusal(field, text) from None
    return checked(field, value)


def option_type(field: dataclasses.Field) -> type:
    """Returns bool, int, float, str or tuple."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    return typing.get_origin(kinds[0]) or kinds[0]


def allowed(field: dataclasses.Field) -> str:
    """Describes the allowed values of an option in words."""
    values = field.metadata["allowed"]
    if isinstance(values, tuple):
        return "one of " + ", ".join(values)
    return f"{_NOUNS[option_type(field)]} {values}".strip()


def checked(field: dataclasses.Field, value):
    """Returns an option's value, converted to its type; ConfigError if its type or size is not allowed."""
    kind = option_type(field)
    parts, part_kind = (value, int) if kind is tuple and isinstance(value, tuple | list) else ((value,), kind)
    if not all(isinstance(part, _TYPES[part_kind]) and isinstance(part, bool) == (kind is bool) for part in parts):
        raise _refusal(field, repr(value))
    if not parts or not all(_is_allowed(part, field.metadata["allowed"]) for part in parts):
        raise _refusal(field, as_text(value)[:100])
    value = tuple(map(int, value)) if kind is tuple else kind(value)
    if kind is str and ("\0" in value or (field.default is None and not value)):
        raise errors.ConfigError(
            f"--{field.name}={value}: it must be text without NUL, and not empty, as from an unset variable. Leave the "
            "option out, or give it a value."
        )
    return value


def _is_of_use(field: dataclasses.Field, values: Mapping[str, Any]) -> bool:
    """Returns whether the values of options, as far as they are known, meet an option's `needs`."""
    other, *choices = field.metadata["needs"] or (None,)
    return other not in values or (values[other] in choices if choices else bool(values[other]))


def _check_needs(options: Options) -> None:
    """Checks `needs`. An option with its default value counts as not given."""
    values = vars(options)
    for field in dataclasses.fields(options):
        if values[field.name] == field.default or _is_of_use(field, values):
            continue
        shown = _on_command_line(field.name, values[field.name])
        other, *choices = field.metadata["needs"]
        if choices == [None]:
            both = f"{shown} and {_on_command_line(other, values[other])}"
            raise errors.ConfigError(f"{both} exclude each other. Give one of them.")
        raise errors.ConfigError(f"{shown} needs {needed(field)}. Give that too.")


def needed(field: dataclasses.Field) -> str:
    """Returns what an option needs, such as --optimizer=momentum or muon; empty if it needs nothing."""
    other, *choices = field.metadata["needs"] or (None,)
    if other is None or choices == [None]:
        return ""
    return f"--{other}={' or '.join(choices)}" if choices else f"--{other}"


def _on_command_line(name: str, value) -> str:
    return f"--{name}" if value is True else f"--{name}={as_text(value)}"


def _is_allowed(value, allowed: tuple | str) -> bool:
    if isinstance(allowed, tuple):
        return value in allowed
    limit = 2**63 if isinstance(value, numbers.Integral) else math.inf
    if isinstance(value, numbers.Real) and not abs(value) < limit:  # nor NaN
        return False
    bounds = re.findall(r"([a-z ]+) (\d+)", allowed.replace(" and ", ","))
    return all(_BOUNDS[word](value, int(bound)) for word, bound in bounds)


def _refusal(field: dataclasses.Field, received: str) -> errors.ConfigError:
    return errors.ConfigError(f"--{field.name}={received}: it must be {allowed(field)}.")


def as_text(value) -> str:
    """Returns a value as the command line takes it."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)
