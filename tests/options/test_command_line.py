"""The command line is the options of config.py, answers --help at once, and puts a mistake into one line."""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys

import hypothesis
import jobs
import pytest
from hypothesis import strategies

from tower_train import __main__, errors
from tower_train.config import MOST_USED, Config, EvaluateOptions, ExportOptions, PredictOptions, RecipeOptions
from tower_train.options import command_line

COMMANDS = [
    ("tower_train", Config),
    ("tower_train.evaluate", EvaluateOptions),
    ("tower_train.export", ExportOptions),
    ("tower_train.predict", PredictOptions),
]


def parse(*words):
    return command_line.parse(["program", *words], Config, "usage")


@pytest.fixture
def without_tensorflow(tmp_path):
    """Runs a command in a Python in which importing TensorFlow fails."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(jobs.ROOT)])}

    def run(*words):
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)

    return run


@pytest.mark.parametrize(("module", "options_class"), COMMANDS)
def test_help_shows_every_option_with_its_default_and_does_not_import_tensorflow(
    without_tensorflow, module, options_class
):
    shown = without_tensorflow(module, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"python -m {module}" in " ".join(shown.stdout.split())
    others = dataclasses.fields(RecipeOptions) if options_class is Config else ()
    for field in [*dataclasses.fields(options_class), *others]:
        [described] = re.findall(rf"^  --{field.name} +(\S.*(?:\n {{35}}\S.*)*)", shown.stdout, re.MULTILINE)
        described = " ".join(described.split())
        text, default = described.removeprefix(field.metadata["help"]), field.default
        assert text != described
        needed, *values = field.metadata["needs"] or [None]
        if needed and values != [None]:
            needed += f"={' or '.join(values)}" if values else ""
            assert text.startswith(f"; with --{needed}")
            text = text.removeprefix(f"; with --{needed}")
        if default is None or default is False:
            assert text == ""
        elif default is True:
            assert text == " [on]"
        else:
            assert text[:2] + text[-1] == " []" and type(default)(text[2:-1]) == default


def test_a_mistake_in_a_command_line_does_not_import_tensorflow(without_tensorflow):
    wrong = without_tensorflow("tower_train", "--train_dir")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert re.fullmatch("tower_train: error: Missing value for flag --train_dir.*\n", wrong.stderr)


def test_a_console_script_is_the_command_of_its_name(without_tensorflow, tmp_path):
    script = tmp_path / "tower-train-find-rate"
    script.write_text("from tower_train import console_scripts\nconsole_scripts.run()\n")
    environment = os.environ | {"PYTHONPATH": str(jobs.ROOT)}
    shown = subprocess.run([sys.executable, script, "--help"], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout == without_tensorflow("tower_train.find_rate", "--help").stdout


@pytest.mark.parametrize(("words", "closed"), [("--help", ">&-"), ("--train_dir", "2>&-"), ("--train_dir", "<&- >&-")])
def test_closed_standard_streams_change_no_status(words, closed):
    command = f"{shlex.quote(sys.executable)} -m tower_train {words} {closed}"
    done = subprocess.run(command, shell=True, cwd=jobs.ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if words == "--help" else 2) and "Traceback" not in done.stderr


def test_help_is_as_wide_as_the_terminal_and_begins_with_the_twenty_most_used_options(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        __main__.parse(["tower_train", "--help"])
    shown = capsys.readouterr().out
    assert 112 < max(map(len, shown.splitlines())) <= 120
    [first, *others] = re.findall(r"^(\S.*):\n((?:  .*\n)+)", shown, re.MULTILINE)
    assert first[0] == "Most used" and re.findall(r"^  --(\w+)", first[1], re.MULTILINE) == list(MOST_USED)
    assert len(MOST_USED) == 20
    groups = {name: set(re.findall(r"^  --(\w+)", lines, re.MULTILINE)) for name, lines in others}
    assert groups["Several machines"] >= {"worker_hosts", "task_index"} and groups["Faults"] >= {"on_nonfinite"}
    assert len(groups) == len(others) and not set.union(*groups.values()) & set(MOST_USED)


def test_options_of_every_type_in_every_spelling_and_in_a_file(tmp_path):
    found = parse("--num_gpus=2", "--epochs", "2", "-seed=32", "--gpus=3,1", "--train_dir=a dir", "--override")
    assert found == Config(num_gpus=2, epochs=2.0, seed=32, gpus=(3, 1), train_dir="a dir", override=True)
    assert type(found.epochs) is float
    said = [["--override"], ["--override=True"], ["--override=false"], ["--nooverride"], ["--override", "--nooverride"]]
    assert [parse(*words).override for words in said] == [True, True, False, False, False]
    (tmp_path / "options").write_text("--num_gpus=2\n# a comment\n\n--override\n--batch_size=7\n")
    expected = Config(num_gpus=2, override=True, batch_size=8)
    assert parse(f"--flagfile={tmp_path}/options", "--batch_size=8") == expected


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("--num_gpu=2", "There is no option --num_gpu. Did you mean --num_gpus? --help lists the options."),
        ("--noverride", "There is no option --noverride. Did you mean --override? --help lists the options."),
        ("--num_gpus=2 garbage", "'garbage' is no option."),
        ("garbage --num_gpus=2", "'garbage' is no option."),
        ("--batch_size", "Missing value for flag --batch_size"),
        ("--batch_size=", "--batch_size=: it must be a whole number at least 1 and at most 16777216."),
        ("--data_dir=", "--data_dir=: it must be"),
        ("--nooverride=1", "--nooverride=1 does not take an argum"),
        *((f"--override={text}", f"--override={text}: it must be true or false.") for text in ("yes", "")),
        *((f"--gpus={text}", f"--gpus={text}: it must be whole numbers separated by commas") for text in ("0;1", "")),
        ("--num_gpus=1.5", "--num_gpus=1.5: it must be a whole"),
        ("--device=CPU", "--device=CPU: it must be one of auto"),
    ],
)
def test_a_mistake_is_named_with_what_may_be_meant(words, start):
    with pytest.raises(errors.ConfigError) as error:
        parse(*words.split())
    assert str(error.value).startswith(start)


NUMBERS = "0 -1 0.5 1e400 nan -inf 0x10 1_0 9223372036854775808 1,2 1,,2 3:1 \u0967 \u00b2".split()
WORDS = strategies.builds(
    "{}{}={}".format,
    strategies.sampled_from(["--", "-", "--no"]),
    strategies.sampled_from([field.name for field in dataclasses.fields(Config)]),
    strategies.text(max_size=30) | strategies.sampled_from([*NUMBERS, "9" * 5000, "\x1b[31m", "x" * 10_000]),
)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(words=strategies.lists(WORDS | strategies.text(max_size=10), min_size=1, max_size=3))
def test_any_command_line_is_a_config_or_a_config_error(words):
    hypothesis.assume(not {"help", "h", "?", "helpshort", "helpfull", "flagfile"} & {w.strip("-") for w in words})
    with contextlib.suppress(errors.ConfigError):
        parse(*words)
