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
from tower_train.options import Options, as_text, declare


def parse(argv: Sequence[str], options_class: type, usage: str):
    """Reads a command line, absl's `--flagfile=FILE` included; prints --help and leaves where it is asked for.

    Args:
      argv: the command line, with the program's name in front.
      options_class: a subclass of Options.
      usage: what the command does, for --help.

    Returns:
      An instance of options_class.

    Raises:
      ConfigError: an unknown option, an option's bad value, or a word that is no option.
    """
    if _asks_for_help(argv):
        print(help_text(_fields(options_class), usage))
        sys.exit(0)
    return options_class(**_given(argv, _fields(options_class)))


def parse_with_files(argv: Sequence[str], options_class: type, usage: str) -> tuple[Options, list[str]]:
    """As `parse`, for a command that takes files too, named by the words that are no options; returns those second."""
    if _asks_for_help(argv):
        print(help_text(_fields(options_class), usage))
        sys.exit(0)
    given, files = _read(argv, _fields(options_class), known_only=False)
    return options_class(**given), files


def parse_with_workload(argv: Sequence[str], usage: str) -> tuple[config.Config, dict]:
    """Reads the trainer's command line, on which a workload's own options may stand too; imports TensorFlow for it.

    Mistakes in the trainer's own options, and --help without --workload, are answered before TensorFlow is imported.

    Args:
      argv, usage: as for `parse`.

    Returns:
      The Config, in which the workload's recipe fills in what the command line does not give, and {name: value} of the
      workload's own options, those of --recipe among them.

    Raises:
      ConfigError: as for `parse`; or no such workload or recipe, or a workload with an option that the trainer has
        already.
    """
    trainers = _fields(config.Config) | _fields(config.RecipeOptions)
    first = _given(argv, trainers, known_only=True)
    if _asks_for_help(argv) and "workload" not in first:
        print(help_text(trainers, usage))
        sys.exit(0)
    # Not yet a Config: which options go together is known with the workload's recipe.
    path = first.get("workload", config.Config.workload)
    import_tensorflow(talkative=first.get("log_device_placement", False))
    from tower_train import workload as workloads

    workload = workloads.load(path)
    own = _fields(type(workload.options)) if workload.options else {}
    if taken := sorted(set(own) & set(trainers)):
        raise errors.ConfigError(
            f"--workload={path} has an option --{taken[0]}, as the trainer has. Give it another name."
        )
    if _asks_for_help(argv):
        print(help_text(trainers | own, usage))
        print(f"Recipes: {', '.join(workload.recipes) or 'none'}.")
        sys.exit(0)
    given = _given(argv, trainers | own)
    chosen = {name: given.pop(name) for name in own if name in given}
    if "recipe" in given:
        chosen = workload.recipe_options(given["recipe"], chosen)
    return workload.with_options(chosen).config(**_without_recipe(given)), chosen


def _without_recipe(given: dict) -> dict:
    return {name: value for name, value in given.items() if name != "recipe"}


def _fields(options_class: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(options_class)}


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(word in ("--help", "-help", "-h", "--helpfull", "--helpshort") for word in argv[1:])


def _given(argv: Sequence[str], fields: dict[str, dataclasses.Field], known_only: bool = False) -> dict:
    """{name: value} of the options on a command line; known_only passes over what is no option or an unknown one."""
    given, rest = _read(argv, fields, known_only)
    if rest and not known_only:
        raise errors.ConfigError(f"{rest[0]!r} is no option. Options begin with --; --help lists them.")
    return given


def _read(argv: Sequence[str], fields: dict[str, dataclasses.Field], known_only: bool) -> tuple[dict, list[str]]:
    """The options, and the words that are none."""
    words = flags.FlagValues()
    words.set_gnu_getopt(True)  # options may follow other words
    for name, field in fields.items():
        is_switch = declare.kind_of(field) is bool
        flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), None, name, None, "", boolean=is_switch), words)
    try:
        rest = words(list(argv), known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, fields, n=1)
        meant = f" Did you mean --{near[0]}?" if near else ""
        raise errors.ConfigError(f"There is no option --{error.flagname}.{meant} --help lists the options.") from None
    except flags.Error as error:
        reason = str(error).removeprefix("ERROR:: ").rstrip(".")
        raise errors.ConfigError(f"{reason}. --help lists the options.") from None
    except UnicodeDecodeError:
        raise errors.ConfigError("a --flagfile holds bytes that are no text in UTF-8. Mend it.") from None
    return {
        name: declare.parse(field, words[name].value) for name, field in fields.items() if words[name].present
    }, rest


def help_text(fields: dict[str, dataclasses.Field], usage: str) -> str:
    """All options with their defaults, under the headings of their groups."""
    lines = [textwrap.dedent(usage).strip()]
    groups: dict[str, list[dataclasses.Field]] = {}
    for field in fields.values():
        groups.setdefault(field.metadata["group"], []).append(field)
    for group, members in groups.items():
        lines += ["", f"{group}:"]
        for field in members:
            default = "" if field.default is None else f" [{as_text(field.default)}]"
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
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, a closed pipe: the status of the run is still the one to leave with
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def start_again() -> None:
    """Runs this process's command anew in its place; what it had, ports included, is given back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
