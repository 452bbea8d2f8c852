"""gpu_check on CPUs: what is cheap runs for real, the rest is named, and a failure is a line of the report."""

import pathlib
import re
import subprocess
import sys
import time

import forked
import gpu_check
import jobs
import pytest


class Forked(forked.Process):
    """A section's process that need not import TensorFlow again."""

    def __init__(self, function, settings, log):
        environment = jobs.environment(jobs.TESTS)
        super().__init__("gpu_checks", (function, settings), environment, str(log), str(log))


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """(words, sections) -> (exit status, {section: its findings in report.md}, report.md, what was printed)."""

    def run(*words, sections=gpu_check.SECTIONS):
        monkeypatch.setattr(gpu_check, "SECTIONS", sections)
        status = gpu_check.main([f"--out={tmp_path / 'out'}", *words])
        text = (tmp_path / "out" / "report.md").read_text()
        parts = [part.partition(": ") for part in text.split("\n## ")[1:]]
        return status, {name: rest.splitlines()[2:] for name, _, rest in parts}, text, capsys.readouterr().out

    return run


def test_without_a_gpu_it_checks_what_is_cheap_and_names_the_rest(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "start", Forked)
    status, report, text, printed = check("--quick")
    assert status == 0, text
    assert list(report) == [section.name for section in gpu_check.SECTIONS]
    for name, found in report.items():
        assert any(line.startswith("- not checked: ") for line in found), name
        assert any(line.startswith(("- ok: ", "- measured: ")) for line in found) == (name in QUICK), name
    differences = re.findall(r"^- ok: toy: 4 towers on logical CPU devices, .*, are one after 10 steps "
                             r"\(greatest_relative_difference (.*)\)$", text, re.MULTILINE)  # fmt: skip
    assert len(differences) == 2 and max(map(float, differences)) < 1e-9
    assert printed.endswith("report.md, log.txt\n")


QUICK = "machine", "towers", "means"
FAULTS = """
import os, time
from gpu_checks.findings import add, attempt, check

def crash(settings):
    add("measured", "before", number=1)
    os.abort()

def hang(settings):
    check(True, "before")
    time.sleep(1000)

def fail(settings):
    with attempt("this"):
        raise ValueError("no such card")
    check(2 > 1, "after")

def leave(settings):
    raise KeyError("lost")

def compile(settings):
    add("measured", "GPU:0: kernels compiled when first used")
"""


def test_a_section_that_crashes_hangs_or_fails_is_a_line_and_not_the_end(check, tmp_path, monkeypatch):
    pathlib.Path(tmp_path, "gpu_faults.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "_LEAST_SECS", 1)
    sections = [gpu_check.Section(name, f"gpu_faults:{function}", name, seconds, True)
                for name, function, seconds in (
                    ("crash", "crash", 9), ("hang", "hang", 2), ("compile", "compile", 9), ("slow", "hang", 2),
                    ("fail", "fail", 9), ("leave", "leave", 9))]  # fmt: skip
    status, report, text, printed = check("--quick", "--minutes=0.2", sections=tuple(sections))
    assert status == 1 and text.startswith("# gpu_check: FAILED\n")
    assert report["crash"][0] == "- measured: before (number 1)" and "left with status -6" in report["crash"][1]
    assert report["hang"][0] == "- ok: before" and "its time limit" in report["hang"][1]
    assert report["fail"] == ["- FAILED: this (error ValueError: no such card)", "- ok: after"]
    assert report["leave"] == ["- FAILED: this section came to its end (error KeyError: 'lost')"]
    assert report["slow"][0] == "- ok: before"
    assert report["slow"][1].startswith("- not checked: slow: "), "and may have compiled all the time"
    assert "FAILED: this (error ValueError: no such card)" in printed
    assert "in hang" in pathlib.Path(tmp_path, "out", "log.txt").read_text()


def test_who_ends_it_ends_the_section_at_work_too(tmp_path):
    words = [sys.executable, jobs.TESTS / "gpu_check.py", "--quick", "--only=machine", f"--out={tmp_path / 'out'}"]
    with subprocess.Popen(words, env=jobs.environment(jobs.TESTS), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("1/1 machine: ")
        while not (started := children(process.pid)):
            assert process.poll() is None
        while b"gpu_checks" not in pathlib.Path("/proc", started[0], "cmdline").read_bytes():
            time.sleep(0.01)
        time.sleep(0.3)  # until it knows whom it has started
        process.terminate()
        assert process.wait(jobs.WAIT_SECS) == 143
    assert not any(pathlib.Path("/proc", pid).exists() for pid in started)


def children(process):
    """The numbers of the processes that one has started."""
    return pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()


def test_the_script_takes_the_python_that_is_named(tmp_path):
    named = tmp_path / "my python"
    named.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    named.chmod(0o755)
    words = [jobs.ROOT / "scripts" / "gpu_check", "--quick", "--out=a b"]
    environment = jobs.environment() | {"GPU_CHECK_PYTHON": str(named), "PYTHONPATH": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{jobs.ROOT}:{jobs.ROOT}/tests {jobs.ROOT}/tests/gpu_check.py --quick --out=a b\n"
