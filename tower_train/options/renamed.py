"""Old names of options and of arguments, which still work and say once what they are called now."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from tower_train import console


class TakesOldNames(type):
    """Makes a dataclass take its fields by their old names too, the `was` of their metadata."""

    def __call__(cls, *args, **values):
        return super().__call__(*args, **with_new_names(values, new_names(dataclasses.fields(cls))))


def new_names(fields: Iterable[dataclasses.Field]) -> dict[str, str]:
    """Returns {old name: name} of the fields that had another name."""
    return {field.metadata["was"]: field.name for field in fields if field.metadata.get("was")}


def with_new_names(values: Mapping[str, Any], new_names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns {name: value} by the new names; `prefix` stands before names in the line that says it."""
    old_ones = {new_names[name]: value for name, value in values.items() if name in new_names}
    for old in values.keys() & new_names.keys():
        say_once(prefix + old, prefix + new_names[old])
    # The old name's value wins: dataclasses.replace(record, old=value) passes the present one by the new name.
    return {name: value for name, value in values.items() if name not in new_names} | old_ones


@functools.cache
def say_once(old: str, new: str) -> None:
    """Says once in a process what an old name is called now."""
    console.notice(f"{old} is now called {new}; please use that name.")
