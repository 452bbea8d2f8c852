"""scripts/gpu_check on CPUs: what is cheap runs for real, the rest is named, and what fails or crashes is a line."""

import re
import subprocess
import sys

import jobs


def check(folder, *words, python=sys.executable, **variables):
    """(status, output)"""
    environment = jobs.environment() | {"GPU_CHECK_PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "-1"} | variables
    words = [jobs.ROOT / "scripts" / "gpu_check", f"--out={folder / 'a b'}", *words]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_without_a_gpu_it_checks_what_it_can_and_names_the_rest(tmp_path):
    status, output = check(tmp_path, "towers", PYTEST_ADDOPTS="-k toy")
    assert status == 0, output
    passed = re.findall(r"^PASSED .*::(.*)$", output, re.MULTILINE)
    assert len(passed) == 3 and "test_towers_are_one[toy-collective]" in passed
    assert len(re.findall("^measured: greatest relative difference .*e-1[0-9]$", output, re.MULTILINE)) == 3
    assert "NCCL needs several GPUs" in output


def test_sections_that_fail_or_crash_are_lines_and_not_the_end(tmp_path):
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\ncase "$*" in *machine*) echo "FAILED x"; exit 1;; *) kill -ABRT $$;; esac\n')
    python.chmod(0o755)
    status, output = check(tmp_path, "machine", "frontends", python=python)
    assert status == 1
    lines = output.splitlines()
    assert lines[:2] == ["== machine", "FAILED x"] and lines[2].startswith("FAILED: status 1 (")
    assert lines[3] == "== frontends" and lines[-1].startswith("FAILED: status 134 (")
    assert check(tmp_path, "engine") == (
        2,
        f"{jobs.ROOT}/scripts/gpu_check: error: engine: give --out=DIR, "
        "--minutes=N, machine, towers, runs or frontends.\n",
    )
