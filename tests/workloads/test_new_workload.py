"""The workload that new_workload writes trains at once."""

import functools
import re

import jobs
import pytest

from tower_train import new_workload


@pytest.fixture
def main(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return functools.partial(command, new_workload)


def test_what_it_writes_trains_and_learns_by_the_command_it_prints(main, tmp_path):
    status, stdout, stderr = main("my_spirals")
    assert (status, stderr) == (0, "")
    [words] = re.findall(r"python -m tower_train (.*)\n", stdout)
    words = [*words.split(), "--train_dir=run", "--units=48", "--eval_every_steps=300", "--summary_every_steps=0"]
    done = jobs.command("tower_train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert jobs.read_json(tmp_path / "run", "run.json")["workload"] == "my_spirals"
    found = jobs.read_json(tmp_path / "run", "result.json")["evaluation"]
    assert found["metrics"]["precision @ 1"]["mean"] > 0.9
    assert "MODULE" not in (tmp_path / "my_spirals.py").read_text()


ONE_NAME = "give one name"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *((words.split(), ONE_NAME) for words in ("", "two names", "a-b", "1st", "class", "a/b")),
        (["mine"], "mine.py is there already"),
        (["numpy"], "numpy is a module already"),
    ],
)
def test_a_name_that_cannot_be_is_refused(main, words, text, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    status, stdout, stderr = main(*words)
    assert (status, stdout) == (2, "") and text in stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
