"""Input that means harm, or was written by chance: one of our own errors, and nothing written elsewhere."""

import dataclasses
import io
import os
import pathlib
import re
import sys

import hypothesis
import jobs
import pytest
from hypothesis import strategies

from cifar10 import records
from tower_train import config, errors
from tower_train.options import command_line, declare
from tower_train.run_dir import directory

FIELDS = list(dataclasses.fields(config.Config))
few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
many = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)


@many
@hypothesis.given(field=strategies.sampled_from(FIELDS), text=strategies.text(max_size=30))
def test_any_text_is_a_value_or_a_config_error(field, text):
    try:
        declare.parse(field, text)
    except errors.ConfigError as error:
        assert field.name in str(error)


LINE = strategies.one_of(
    strategies.text(strategies.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=30),
    strategies.builds("--{}={}".format, strategies.sampled_from([f.name for f in FIELDS]), strategies.text(max_size=8)),
)
BYTES = strategies.binary(max_size=20)


@few
@hypothesis.given(lines=strategies.lists(LINE.map(lambda line: line.encode(errors="replace")) | BYTES, max_size=4))
def test_any_flag_file_is_options_or_a_config_error(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("flags") / "flags"
    path.write_bytes(b"\n".join(lines))
    try:
        command_line.parse(["tower_train", f"--flagfile={path}"], config.Config, "")
    except (errors.ConfigError, SystemExit):  # SystemExit: a line asks for help
        pass


@pytest.mark.parametrize("kind", ["missing", "directory", "itself"])
def test_a_flag_file_that_cannot_be_read_is_a_config_error(kind, tmp_path):
    path = tmp_path / "flags"
    if kind == "directory":
        path.mkdir()
    elif kind == "itself":
        path.write_text(f"--flagfile={path}\n--seed=x\n")
    with pytest.raises(errors.ConfigError):
        command_line.parse(["tower_train", f"--flagfile={path}"], config.Config, "")


@few
@hypothesis.given(content=strategies.binary(max_size=100) | strategies.text(max_size=50).map(str.encode))
def test_any_json_file_is_an_object_or_a_run_error(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "run.json").write_bytes(content)
    try:
        assert isinstance(directory.RunDirectory(folder).read("run.json"), dict)
    except errors.RunError as error:
        assert str(folder / "run.json") in str(error)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_json_is_a_run_error_and_no_crash(content, tmp_path):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(errors.RunError, match="cannot be read"):
        directory.RunDirectory(tmp_path).read("run.json")


@few
@hypothesis.given(
    junk=strategies.lists(strategies.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=5)
)
def test_rubbish_in_the_metrics_is_dropped_and_the_steps_stay(junk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    lines = [b'{"step": 5}', *junk, b'{"step": 10}', b'{"step": "x"}', b'{"step": 15}']
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    directory.RunDirectory(folder).cut_metrics(10)
    steps = [record["step"] for record in jobs.metrics(folder)]
    assert [step for step in steps if step in (5, 10, 15)] == [5, 10]


@few
@hypothesis.given(
    content=strategies.binary(max_size=200), count=strategies.integers(0, 3), label=strategies.integers(0, 255)
)
def test_any_data_file_is_records_or_a_data_error(content, count, label, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "file.bin"
    path.write_bytes(content + (bytes([label]) + bytes(records.RECORD_BYTES - 1)) * count)
    whole = not content and count and label < 10
    try:
        assert len(records.read([path]).labels) == count and whole
    except errors.DataError as error:
        assert str(path) in str(error) and not whole


@pytest.mark.parametrize("kind", ["symlink loop", "directory", "device"])
def test_a_data_file_that_is_none_is_a_data_error(kind, tmp_path):
    path = tmp_path / "data_batch_1.bin"
    if kind == "symlink loop":
        path.symlink_to(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = pathlib.Path("/dev/zero")
    with pytest.raises(errors.DataError, match=re.escape(str(path))):
        records.read([path])


NAMES = {
    "newline": b"a\nb", "not UTF-8": b"a\xff\xfeb", "255 characters": b"x" * 255, "256 characters": b"x" * 256,
    "terminal": b"\x1b[31mred",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_train_dir_of_any_name_is_used_or_refused_in_one_line(name, tmp_path):
    """Nothing is written but below it."""
    path = os.fsdecode(bytes(tmp_path) + b"/" + name)
    try:
        jobs.train_toy(path, max_steps=2, summary_every_steps=0)
    except errors.RunError as error:
        assert str(error).isprintable()
        assert os.listdir(bytes(tmp_path)) == []
    else:
        assert os.path.exists(bytes(tmp_path) + b"/" + name + b"/model.ckpt-2.index")
        assert os.listdir(bytes(tmp_path)) == [name]


def test_no_module_unpickles():
    """Checkpoints, arrays and JSON are read by formats that hold data only."""
    sources = [path for folder in ("tower_train", "cifar10") for path in (jobs.ROOT / folder).rglob("*.py")]
    assert len(sources) > 30
    for path in sources:
        assert not re.search(r"import (pickle|marshal|shelve)|allow_pickle=True|\beval\(", path.read_text()), path


def test_stdout_that_takes_nothing_does_not_end_a_run(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert jobs.train_toy(tmp_path, max_steps=5).step == 5
