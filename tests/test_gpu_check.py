"""gpu_check on CPUs: what is cheap runs for real, the rest is named, and a failure is a line of the report."""

import json
import pathlib
import subprocess
import sys
import time

import forked
import gpu_check
import jobs
import pytest
from gpu_checks import machine


class Forked(forked.Process):
    """A section's process that need not import TensorFlow again."""

    def __init__(self, function, settings, log):
        environment = jobs.environment(jobs.TESTS)
        super().__init__("gpu_checks", (function, settings), environment, str(log), str(log))


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """(words, sections) -> (exit status, report.json, report.md, what was printed)."""

    def run(*words, sections=gpu_check.SECTIONS):
        monkeypatch.setattr(gpu_check, "SECTIONS", sections)
        status = gpu_check.main([f"--out={tmp_path / 'out'}", *words])
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        return status, report, (tmp_path / "out" / "report.md").read_text(), capsys.readouterr().out

    return run


def test_without_a_gpu_it_checks_what_is_cheap_and_names_the_rest(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "start", Forked)
    status, report, text, printed = check("--quick")
    assert status == 0, text
    by_name = {outcome["section"]["name"]: outcome for outcome in report}
    assert list(by_name) == [section.name for section in gpu_check.SECTIONS]
    done = {name for name, section in by_name.items() if section["verdict"] == "ok"}
    assert done == {"machine", "towers", "means"}
    for name, section in by_name.items():
        unchecked = [each for each in section["findings"] if each["verdict"] == "not checked"]
        assert unchecked and all(each["numbers"]["why"] for each in unchecked), name
    differences = [each["numbers"]["greatest_relative_difference"] for each in by_name["towers"]["findings"][1:]]
    assert len(differences) == 2 and max(differences) < 1e-9
    assert "- ok: toy: 4 towers on logical CPU devices, cpu, are one after 10 steps" in text
    assert printed.endswith("report.md, report.json, log.txt\n")


FAULTS = """
import os, time

def crash(findings, settings):
    findings.measured("before", number=1)
    os.abort()

def hang(findings, settings):
    findings.check(True, "before")
    time.sleep(1000)

def fail(findings, settings):
    with findings.attempt("this"):
        raise ValueError("no such card")
    findings.check(2 > 1, "after")

def leave(findings, settings):
    raise KeyError("lost")

def compile(findings, settings):
    findings.measured("GPU:0", kernels="compiled when first used")
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
    told = {outcome["section"]["name"]: [(each["verdict"], each["what"]) for each in outcome["findings"]]
            for outcome in report}  # fmt: skip
    assert told["crash"][0] == ("measured", "before") and "left with status -6" in told["crash"][1][1]
    assert told["hang"][0] == ("ok", "before") and "its time limit" in told["hang"][1][1]
    assert told["fail"] == [("FAILED", "this"), ("ok", "after")]
    assert told["leave"] == [("FAILED", "this section came to its end")]
    assert told["slow"] == [("ok", "before"), ("not checked", "slow")]  # and may have compiled all the time
    assert "FAILED: this (error ValueError: no such card)" in printed
    log = pathlib.Path(tmp_path, "out", "log.txt").read_text()
    assert "in hang" in log and "KeyError: 'lost'" in log


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


def test_nvidia_smi_is_asked_of_the_gpus_that_the_process_may_use(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    rows = "GPU-aa, Disabled, 100, A", "GPU-ab, [N/A], 200, B", "GPU-b, Disabled, [N/A], C", "GPU-c, Enabled, 9, D"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{row}'" for row in rows)]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    a, b, c = ["100", "A"], ["200", "B"], ["[N/A]", "C"]
    cases = {None: None, "0,1,2": [a, b, c], "3": None, "": [], "2,0": [c, a], "1,-1,0": [b], "GPU-ab,0": [b, a],
             "GPU-a": [], "MIG-x": None}  # fmt: skip
    for visible, expected in cases.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        visible is None or monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.nvidia_smi(("memory.used", "name")) == expected, visible
    for visible, expected in (("1,0", [200, 100]), ("0,2", None), ("MIG-x", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.megabytes("memory.used") == expected
