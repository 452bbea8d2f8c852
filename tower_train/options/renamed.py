"""Old names of options and of keyword arguments: they still work, and say once what they are called now."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tower_train import console

T = TypeVar("T", bound=Callable)


def keywords(**new_names: str) -> Callable[[T], T]:
    """Lets a function or a dataclass take keyword arguments by their old names too: `@keywords(old="new")`."""

    def decorate(target: T) -> T:
        function = target.__init__ if isinstance(target, type) else target

        @functools.wraps(function)
        def call(*args, **values):
            return function(*args, **with_new_names(values, new_names))

        if not isinstance(target, type):
            return call
        target.__init__ = call
        for old, new in new_names.items():
            setattr(target, old, property(operator.attrgetter(new)))
        return target

    return decorate


def with_new_names(values: Mapping[str, Any], new_names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Returns {name: value} by the new names.

    Args:
      values: {name: value}, where a value by its old name wins, as of `dataclasses.replace(record, old=value)`.
      new_names: {old: new}.
      prefix: before names, in the line that says it.
    """
    for old in values.keys() & new_names.keys():
        say_once(prefix + old, prefix + new_names[old])
    old_ones = {new_names[name]: value for name, value in values.items() if name in new_names}
    return {name: value for name, value in values.items() if name not in new_names} | old_ones


@functools.cache
def say_once(old: str, new: str) -> None:
    """Says once in a process what an old name is called now."""
    console.notice(f"{old} is now called {new}; please use that name.")
