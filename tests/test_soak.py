"""The soak kills, damages and compares; seconds of it find nothing."""

import re
import sys

import jobs
import soak
import soak_workload


def test_a_run_that_is_killed_for_seconds_loses_and_repeats_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes=0.02", "--seed=4"])
    monkeypatch.setattr(jobs, "WAIT_SECS", jobs.WAIT_SECS)  # which it sets,
    monkeypatch.setenv(soak_workload.LOG, "")  # as it does this
    assert soak.main() == 0
    figures = capsys.readouterr().out.splitlines()[-1]
    assert int(re.search(r"SIGKILL (\d+)", figures)[1]) > 0
    assert figures.endswith("; 0 runs lost, 0 examples lost or repeated, 0 mismatches")
