"""Command lines: options, --help, and errors as one line and an exit status. No TensorFlow here."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from tower_train import console, errors, host
from tower_train.options import Options, as_text, declare, renamed

Fields = dict[str, dataclasses.Field]


def parse(argv: Sequence[str], options_class: type[Options], usage: str, files: list[str] | None = None) -> Options:
    """Reads a command line, absl's `--flagfile=FILE` included; prints --help and leaves if that is asked for.

    Args:
      argv: the command line, with the program's name in front.
      options_class: makes the options.
      usage: paragraphs about the command, for --help.
      files: gets the words that are no options, for a command that takes files; None if it takes none.

    Raises:
      ConfigError: an unknown option, a bad value, or a word that is no option.
    """
    fields = fields_of(options_class)
    answer_help(argv, fields, usage)
    return options_class(**parse_values(argv, fields, files=files))


def fields_of(*options_classes: type[Options]) -> Fields:
    """Returns the options of several classes by name."""
    return {field.name: field for options_class in options_classes for field in dataclasses.fields(options_class)}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Returns whether a command line has --help."""
    return any(word in ("--help", "-help", "-h", "--helpfull", "--helpshort") for word in argv[1:])


def answer_help(
    argv: Sequence[str], fields: Fields, usage: str, most_used: Sequence[str] = (), defaults: Mapping[str, Any] = {}
) -> None:
    """Prints --help and leaves if that is asked for. Arguments as of `_help_text`."""
    if asks_for_help(argv):
        console.say(_help_text(fields, usage, most_used, defaults))
        sys.exit(0)


def parse_values(
    argv: Sequence[str], fields: Fields, known_only: bool = False, files: list[str] | None = None
) -> dict[str, Any]:
    """Returns the options {name: value} of a command line. Arguments and errors as `parse`.

    Args:
      fields: all options by name.
      known_only: ignore unknown options and words that are no options.
    """
    new_names = declare.new_names(fields.values())
    by_any_name = fields | {old: fields[name] for old, name in new_names.items()}
    read = flags.FlagValues()
    read.set_gnu_getopt(True)  # options may follow other words
    for name, field in by_any_name.items():
        is_switch = declare.kind_of(field) is bool
        flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, name, None, "", boolean=is_switch), read)
    try:
        words = read(list(argv), known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, fields, n=1)
        meant = f" Did you mean --{near[0]}?" if near else ""
        raise errors.ConfigError(f"There is no option --{error.flagname}.{meant} --help lists the options.") from None
    except flags.Error as error:
        reason = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise errors.ConfigError(f"{reason}. --help lists the options.") from None
    except UnicodeDecodeError:
        raise errors.ConfigError("a --flagfile holds bytes that are no text in UTF-8. Mend it.") from None
    if files is not None:
        files += words
    elif words and not known_only:
        raise errors.ConfigError(f"{words[0]!r} is no option. Options begin with --; --help lists them.")
    values = {name: declare.parse(field, read[name].value) for name, field in by_any_name.items() if read[name].present}
    return renamed.with_new_names(values, new_names, "--")


def _help_text(fields: Fields, usage: str, most_used: Sequence[str] = (), defaults: Mapping[str, Any] = {}) -> str:
    """Lists all options with their defaults under the headings of their groups, as wide as the terminal.

    Args:
      fields: all options by name.
      usage: paragraphs, separated by empty lines.
      most_used: names of options that come first, under a heading of their own.
      defaults: {name: value}, instead of the options' own.
    """
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    groups = {"Most used": [fields[name] for name in most_used]} if most_used else {}
    for name, field in fields.items():
        if name not in most_used:
            groups.setdefault(field.metadata["group"], []).append(field)
    parts = [fill(" ".join(paragraph.split())) for paragraph in usage.strip().split("\n\n")]
    for group, members in groups.items():
        lines = [
            fill(_about(field, defaults), initial_indent=f"  --{field.name:<31}", subsequent_indent=" " * 35)
            for field in members
        ]
        parts.append("\n".join([f"{group}:", *lines]))
    parts.append(fill(
        "Defaults are in [brackets], or in (parentheses) if they follow from something else. Switches are off unless "
        "they say [on]; --NAME turns one on, --noNAME off. --flagfile=FILE reads options from a file, one per line."
    ))  # fmt: skip
    return "\n\n".join(parts)


def _about(field: dataclasses.Field, defaults: Mapping[str, Any]) -> str:
    """Returns an option's help with its default: none for a switch that is off, and one where several would be told."""
    text, value = field.metadata["help"], defaults.get(field.name, field.default)
    if value is None or value is False or value == "":
        return text
    if field.default is None:
        text = re.sub(r" \([^()]*\)$", "", text)  # which it follows from if nothing else gives it
    shown = "on" if value is True else f"{value:.8g}" if isinstance(value, float) else as_text(value)
    return f"{text} [{shown}]"


def count(text: str) -> int:
    """Reads a whole number above 0, as a type for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command and exits with the status that it returns; a user's mistake is a line on stderr and status 2."""
    try:
        status = main(sys.argv)
    except errors.UserError as error:
        lines = str(error).split("\n") if isinstance(error, errors.LayoutError) else [str(error)]
        console.notice("error: " + "\n".join(map(console.one_line, lines)))
        status = error.exit_status
    except KeyboardInterrupt:  # before or after the steps, which have a handler of their own
        console.notice("interrupted")
        status = 130
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe, which does not change the status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def start_again(environment: Mapping[str, str]) -> None:
    """Replaces this process by a new run of its command, which frees what it held, such as ports.

    SIGUSR1, which ends a process without a handler, waits until there is one.

    Args:
      environment: further variables of the new run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


def import_tensorflow(talkative: bool = False) -> None:
    """Imports TensorFlow without its remarks on stderr about a missing NVIDIA driver.

    They stay if there is a driver, if talkative, and if the import fails, since they then say why.
    """
    if talkative or os.path.exists(host.NVIDIA_DRIVER):
        with _collecting_no_garbage():
            import tensorflow  # noqa: F401

        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only
    with console.stderr_held_back(), _collecting_no_garbage():
        import tensorflow

        tensorflow.config.list_physical_devices("GPU")  # remarks come with its first use


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Collects no garbage within this block, a fifth of the import, and never looks through what it made, a tenth of
    building a graph."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
