"""From a command line to an options record, and from an error to one line and an exit status. No TensorFlow here."""

import dataclasses
import difflib
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from tower_train import config, errors


def parse(argv: Sequence[str], options_class: type, usage: str):
    """Reads a command line, absl's `--flagfile=FILE` included; prints --help and leaves where it is asked for.

    Args:
      argv: the command line, with the program's name in front.
      options_class: a subclass of config.Options.
      usage: what the command does, for --help.

    Returns:
      An instance of options_class.

    Raises:
      ConfigError: an unknown option, an option's bad value, or a word that is no option.
    """
    if any(word in ("--help", "-help", "-h", "--helpfull", "--helpshort") for word in argv[1:]):
        print(help_text(options_class, usage))
        sys.exit(0)
    fields = {field.name: field for field in dataclasses.fields(options_class)}
    words = flags.FlagValues()
    for name, field in fields.items():
        is_switch = config.kind_of(field) is bool
        flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, name, None, "", boolean=is_switch), words)
    try:
        rest = words(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, fields, n=1)
        meant = f" Did you mean --{near[0]}?" if near else ""
        raise errors.ConfigError(f"There is no option --{error.flagname}.{meant} --help lists the options.") from None
    except flags.Error as error:
        reason = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise errors.ConfigError(f"{reason}. --help lists the options.") from None
    if rest:
        raise errors.ConfigError(f"{rest[0]!r} is no option. Options begin with --; --help lists them.")
    given = {name: config.parse(field, words[name].value) for name, field in fields.items() if words[name].present}
    return options_class(**given)


def help_text(options_class: type, usage: str) -> str:
    """All options with their defaults, under the headings of their groups."""
    lines = [textwrap.dedent(usage).strip()]
    groups: dict[str, list[dataclasses.Field]] = {}
    for field in dataclasses.fields(options_class):
        groups.setdefault(field.metadata["group"], []).append(field)
    for group, fields in groups.items():
        lines += ["", f"{group}:"]
        for field in fields:
            default = "" if field.default is None else f" [{config._text(field.default)}]"
            text = field.metadata["help"] + default
            first = f"  --{field.name:<28}"
            lines += textwrap.wrap(
                text, 110, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
            )
    lines += ["", "Also: --flagfile=FILE reads options from a file, one a line; a switch is turned off with --noNAME.",
              "Defaults stand in [brackets], or in (parentheses) where they follow from something else."]  # fmt: skip
    return "\n".join(lines)


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command: its return value is the exit status; a user's mistake is one line on stderr and status 2."""
    try:
        status = main(sys.argv)
    except errors.UserError as error:
        print(f"tower_train: error: {error}", file=sys.stderr)
        status = error.exit_status
    except KeyboardInterrupt:  # before or after the steps, which have a handler of their own
        print("tower_train: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def import_tensorflow(talkative: bool = False) -> None:
    """Imports TensorFlow without the remarks it writes to stderr on a machine that has no NVIDIA driver.

    They stay where there is a driver, where the import fails, since they then say why, and where talkative.
    """
    if talkative or os.path.exists("/proc/driver/nvidia/version"):
        import tensorflow  # noqa: F401

        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as remarks:
        os.dup2(remarks.fileno(), 2)
        try:
            import tensorflow

            tensorflow.config.list_physical_devices("GPU")  # makes its remarks on first use
        except BaseException:
            remarks.seek(0)
            os.write(stderr, remarks.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
