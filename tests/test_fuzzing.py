"""The fuzz notices what it looks for, and finds nothing in a few cases of each kind."""

import os
import signal
import sys
import time

import fuzz
import fuzz_cases
import jobs
import pytest

LINE = "tower_train: error: {}"


def say(text, status):
    def main(argv):
        print(text, file=sys.stderr)
        return status

    return main


@pytest.mark.parametrize(
    ("main", "fault"),
    [
        (say("fine", 0), ""),
        (say(LINE.format("a mistake."), 2), ""),
        (say(LINE.format("a mistake.\nof two lines"), 2), "status 2 without one line"),
        (say("nothing", 2), "status 2 without one line"),
        (say(LINE.format("a mistake."), 1), "status 1"),
        (say("Traceback (most recent call last):", 0), "traceback"),
        (lambda argv: [][0], "status 1"),
        (lambda argv: os.kill(os.getpid(), signal.SIGSEGV), f"status {-signal.SIGSEGV}"),
        (lambda argv: time.sleep(60), "stuck"),
    ],
    ids=["fine", "one line", "two lines", "no line", "another status", "traceback", "raises", "crashes", "hangs"],
)
def test_what_is_not_documented_is_a_fault(main, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_SECS", 5.5)
    monkeypatch.setattr(fuzz, "LEAVING_SECS", 1)
    assert fuzz.run(fuzz_cases.Case(main, ()), tmp_path).fault == fault


def test_a_few_cases_of_each_kind_are_without_fault():
    done = jobs.command("fuzz", "--cases=2", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"fuzz: {kind}" for kind in fuzz_cases.KINDS]
