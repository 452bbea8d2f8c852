"""The workload that new_workload writes trains at once."""

import re

import jobs
import pytest

from tower_train import new_workload


def test_what_it_writes_trains_and_learns_by_the_command_it_prints(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = command(new_workload, "my_spirals")
    assert (status, stderr) == (0, "")
    [words] = re.findall(r"python -m tower_train (.*)\n", stdout)
    words = [*words.split(), "--train_dir=run", "--units=48", "--eval_every_steps=300", "--summary_every_steps=0"]
    done = jobs.command("tower_train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert jobs.read_json(tmp_path / "run", "run.json")["workload"] == "my_spirals"
    found = jobs.read_json(tmp_path / "run", "result.json")["evaluation"]
    assert found["metrics"]["precision @ 1"]["mean"] > 0.9
    assert "MODULE" not in (tmp_path / "my_spirals.py").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *((words.split(), "give one name") for words in ("", "two names", "a-b", "1st", "class", "a/b")),
        (["mine"], "mine.py is there already"),
        (["numpy"], "numpy is a module already"),
        (["__main__"], "__main__ is a module already"),
    ],
)
def test_a_name_that_cannot_be_is_refused(refusal, words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("precious")
    assert text in refusal(new_workload, *words)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
