"""Input that means harm, or was written by chance: one of our own errors, and nothing written elsewhere."""

import dataclasses
import io
import os
import sys

import hypothesis
import jobs
import pytest
from hypothesis import strategies

from tower_train import config, errors
from tower_train.options import parse
from tower_train.run_dir import directory

FIELDS = list(dataclasses.fields(config.Config))
few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
many = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)


@many
@hypothesis.given(field=strategies.sampled_from(FIELDS), text=strategies.text(max_size=30))
def test_any_text_is_a_value_or_a_config_error(field, text):
    try:
        parse(field, text)
    except errors.ConfigError as error:
        assert field.name in str(error)


@few
@hypothesis.example(content=b'{"a":' * 100_000)
@hypothesis.given(content=strategies.binary(max_size=100) | strategies.text(max_size=50).map(str.encode))
def test_any_json_file_is_an_object_or_a_run_error(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "run.json").write_bytes(content)
    try:
        assert isinstance(directory.RunDirectory(folder).read("run.json"), dict)
    except errors.RunError as error:
        assert str(folder / "run.json") in str(error)


NAMES = {"newline": b"a\nb", "not UTF-8": b"a\xff\xfeb", "256 characters": b"x" * 256}


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


def test_stdout_that_takes_nothing_does_not_end_a_run(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert jobs.train_toy(tmp_path, max_steps=5).step == 5
