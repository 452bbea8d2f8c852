"""Command lines: options, --help, and errors as one line and an exit status. No TensorFlow here."""

import dataclasses
import difflib
import functools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from tower_train import console, errors, options

Fields = dict[str, dataclasses.Field]
T = TypeVar("T", bound=options.Options)


def parse(argv: Sequence[str], options_class: type[T], usage: str, files: list[str] | None = None) -> T:
    """Reads a command line, absl's `--flagfile=FILE` included; prints --help and leaves if that is asked for.

    `files` gets the words that are no options, for a command that takes files. Raises ConfigError for an unknown
    option, a bad value, or another word.
    """
    fields = option_fields(options_class)
    answer_help(argv, fields, usage)
    return options_class(**parse_values(argv, fields, files=files))


def option_fields(*options_classes: type[options.Options]) -> Fields:
    """Returns the options of several classes by name."""
    return {field.name: field for options_class in options_classes for field in dataclasses.fields(options_class)}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Returns whether a command line has --help."""
    return any(word in ("--help", "-help", "-h", "--helpfull", "--helpshort") for word in argv[1:])


def answer_help(
    argv: Sequence[str], fields: Fields, usage: str, most_used: Sequence[str] = (), defaults: Mapping[str, Any] = {}
) -> None:
    """Prints --help and leaves if that is asked for: the paragraphs of `usage`, the options most used, and all others
    under the headings of their groups, as wide as the terminal. defaults: {name: value}, instead of the options' own.
    """
    if not asks_for_help(argv):
        return
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    groups = {"Most used": [fields[name] for name in most_used]} if most_used else {}
    for name, field in fields.items():
        if name not in most_used:
            groups.setdefault(field.metadata["group"], []).append(field)
    parts = [fill(" ".join(paragraph.split())) for paragraph in usage.strip().split("\n\n")]
    for group, members in groups.items():
        lines = [
            fill(_help(field, defaults), initial_indent=f"  --{field.name:<31}", subsequent_indent=" " * 35)
            for field in members
        ]
        parts.append("\n".join([f"{group}:", *lines]))
    parts.append(
        fill(
            "Defaults are in [brackets], or in (parentheses) if they follow from something else. Switches are off "
            "unless they say [on]; --NAME turns one on, --noNAME off. --flagfile=FILE reads options from a file, one "
            "per line."
        )
    )
    console.say("\n\n".join(parts))
    sys.exit(0)


def _help(field: dataclasses.Field, defaults: Mapping[str, Any]) -> str:
    """Returns an option's help with what it needs, and its default, if that is not just a switch that is off."""
    text, value = field.metadata["help"], defaults.get(field.name, field.default)
    has_default = value is not None and value is not False and value != ""
    if has_default and field.default is None:
        text = re.sub(r" \([^()]*\)$", "", text)  # the default that a recipe replaces
    needed = options.needed(field)
    text += f"; with {needed}" if needed else ""
    return f"{text} [{'on' if value is True else options.as_text(value)}]" if has_default else text


def parse_values(
    argv: Sequence[str], fields: Fields, known_only: bool = False, files: list[str] | None = None
) -> dict[str, Any]:
    """Returns the options {name: value} of a command line; files and errors as `parse`. known_only: ignore unknown
    options and words that are no options."""
    read = flags.FlagValues()
    read.set_gnu_getopt(True)  # options may follow other words
    for name, field in fields.items():
        is_switch = options.option_type(field) is bool
        flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, name, None, "", boolean=is_switch), read)
    try:
        words = read(list(argv), known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, fields, n=1)
        meant = f" Did you mean --{near[0]}?" if near else ""
        raise errors.ConfigError(f"There is no option --{error.flagname}.{meant} --help lists the options.") from None
    except (flags.Error, ValueError) as error:  # the second of a --flagfile, or of --noNAME=VALUE
        reason = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise errors.ConfigError(f"{reason}. --help lists the options.") from None
    if files is not None:
        files += words
    elif words and not known_only:
        raise errors.ConfigError(f"{words[0]!r} is no option. Options begin with --; --help lists them.")
    return {name: options.parse(field, read[name].value) for name, field in fields.items() if read[name].present}


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command and exits with the status that it returns; a user's mistake is a line on stderr and status 2."""
    for name in ("stdin", "stdout", "stderr"):  # closed, its descriptor would be that of the next file
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    try:
        status = main(sys.argv)
    except errors.UserError as error:
        text = str(error) if isinstance(error, errors.GraphError) else console.one_line(str(error))
        console.notice(f"error: {text}")
        status = error.exit_status
    except KeyboardInterrupt:
        console.notice("interrupted")
        status = 130
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe, which does not change the status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
