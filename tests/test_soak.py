"""The soak disturbs and compares: a few trials find nothing, and it finds what is not as it should be."""

import random
import re

import jobs
import pytest
import soak
import soak_workload


def test_a_few_trials_lose_and_repeat_nothing_and_end_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv(soak_workload.LOG, "")  # which it sets
    assert soak.main(["--cases=alone,starts", "--trials=3", "--seed=4"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"trials in all +(\d+)", printed)] == [3, 3]
    assert re.findall(r"lost, different or untrue +(\d+)", printed) == ["0", "0"]


def test_another_log_line_and_an_untrue_line_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv(soak_workload.LOG, str(tmp_path / "run" / "log"))
    run = soak.Run(soak.KINDS["alone"], random.Random(0), tmp_path / "run")
    jobs.train_toy(run.train_dir, **(soak.OPTIONS | dict(num_gpus=2, max_steps=20)))
    assert run._differences(20) == {}
    metrics = run.train_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"examples": 30', '"examples": 31'))
    assert run._differences(20) == {"log lines": 1}
    text = (
        "*** worker 1: worker 1 (b:2) is missing: no sign of life\nworker 0 (the chief, a:1) trains with worker 1 (b:2)"
    )
    said = type("Said", (), {"output": lambda self: text})()
    with pytest.raises(soak.Lost, match="untrue: .* worker 1 .b:2. is missing"):
        run._look(said)
    run._touch(1)
    run._look(type("Said", (), {"output": lambda self: text})())
