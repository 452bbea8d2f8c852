"""Checks and measures everything on a machine with GPUs, and reports what was done and what could not be.

scripts/gpu_check [--out=DIR] [--minutes=8] [--quick] [--only=SECTION,...]

Each section is a process of its own with a time limit, so that one that crashes or hangs is a line of the report. DIR
gets report.md and log.txt, rewritten after each section. Without a GPU the sections do what they can on the CPU and
name the rest; --quick: only what is cheap there. Exit status: 0 nothing failed, 1 something did, 2 a wrong option.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from gpu_checks import findings
from gpu_checks.findings import COMPILED, FAILED, UNCHECKED

TESTS = pathlib.Path(__file__).parent
_LEAST_SECS = 12  # less is not worth a start
_SLACK = 1.6  # times its share a section may take; what it leaves the others have


class Section(NamedTuple):
    """One section: its name, its function, its description, its seconds on a machine with GPUs; and whether --quick has
    it, since it is cheap on CPUs too."""

    name: str
    function: str
    about: str
    seconds: int
    is_quick: bool = False


SECTIONS = (
    Section("machine", "gpu_checks.machine:kernels", "GPUs, driver, libraries, first kernels", 60, True),
    Section("towers", "gpu_checks.towers:on_one_card", "several towers on one card against one, in float64", 45, True),
    Section("cards", "gpu_checks.towers:on_several_cards", "several cards against one, in float64", 45),
    Section("means", "gpu_checks.towers:known_means", "each all-reduce on numbers whose means are known", 15, True),
    Section("memory", "gpu_checks.runs:memory", "memory of GPUs, an evaluation beside a training", 40),
    Section("runs", "gpu_checks.runs:equal", "workers, resumes, places, GPU against CPU, in float64", 90),
    Section("fronts", "gpu_checks.fronts:trained", "multi_gpu_model and Estimators", 35),
    Section("benchmark", "gpu_checks.machine:benchmark", "beside Keras, the port and the ceiling of a card", 80),
)


def start(function: str, settings: str, log: pathlib.Path) -> subprocess.Popen:
    """Starts a section's process, whose output is added to the log."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_CACHE_MAXSIZE": str(4 << 30), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with open(log, "a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "gpu_checks", function, settings], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=defaults | os.environ | {"PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip


def run_section(section: Section, limit: float, quick: bool, shared: pathlib.Path, log: pathlib.Path) -> list[str]:
    """Runs a section for so many seconds at most, and returns its findings."""
    scratch, data_dir = shared / section.name, str(shared / "data")
    scratch.mkdir()
    settings = dict(end=time.time() + limit, quick=quick, scratch=str(scratch), data_dir=data_dir)
    with open(log, "a") as file:
        file.write(f"\n===== {section.name} =====\n")
    began = log.stat().st_size
    process, status = start(section.function, json.dumps(settings), log), None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()
        process.wait()
    output = log.read_bytes()
    found = findings.read(output[began:].decode(errors="replace"))
    if status is None and COMPILED.encode() in output:
        why = f"its {limit:.0f} s went into compiling kernels: start again, which finds them, or give --minutes=40"
        found.append(f"{UNCHECKED}: {section.about}: {why}")
    elif status != 0:
        why = f"left with status {status}" if status else f"was ended after {limit:.0f} s, its time limit"
        found.append(f"{FAILED}: its process {why}; see the end of log.txt")
    return found


def run(asked, out: pathlib.Path) -> list[str]:
    """Runs the sections, writes the report after each, and prints how it goes; returns all findings."""
    log, every, report = out / "log.txt", [], []
    log.write_text("")
    waiting = [section for section in SECTIONS if section.name in asked.only]
    end = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as shared:
        while waiting:
            share = waiting[0].seconds / sum(section.seconds for section in waiting)
            section, began = waiting.pop(0), time.monotonic()
            print(f"{len(asked.only) - len(waiting)}/{len(asked.only)} {section.name}: {section.about} ...", flush=True)
            if asked.quick and not section.is_quick:
                found = [f"{UNCHECKED}: {section.about}: --quick; the tests have it on CPUs"]
            elif end - began < _LEAST_SECS:
                found = [f"{UNCHECKED}: {section.about}: no time was left"]
            else:
                limit = min(end - began, max(_LEAST_SECS, _SLACK * share * (end - began)))
                found = run_section(section, limit, asked.quick, pathlib.Path(shared), log)
            for line in found:
                if line.startswith(FAILED):
                    print(f"    {line}")
            told = f"{counts(found)}, {time.monotonic() - began:.0f} s"
            print(f"    {told}", flush=True)
            every += found
            report += ["", f"## {section.name}: {section.about}: {told}", "", *(f"- {line}" for line in found)]
            where = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} on {platform.node()}, {' '.join(sys.argv[1:])}"
            head = f"# gpu_check: {verdict(every)}\n\n{where}: {counts(every)}; {len(waiting)} sections not begun."
            (out / "report.md").write_text("\n".join([head, *report]) + "\n")
    return every


def counts(found: list[str]) -> str:
    numbers = {verdict: sum(line.startswith(f"{verdict}: ") for line in found) for verdict in findings.VERDICTS}
    return ", ".join(f"{count} {verdict}" for verdict, count in numbers.items() if count)


def verdict(found: list[str]) -> str:
    return FAILED if any(line.startswith(FAILED) for line in found) else findings.OK


def parse(words):
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--minutes", type=float, default=8.0, help="of all sections together (8)")
    parser.add_argument("--quick", action="store_true", help="only what is cheap on CPUs")
    parser.add_argument("--only", default=",".join(names), help=f"of {', '.join(names)}")
    asked = parser.parse_args(words)
    asked.only = asked.only.split(",")
    if unknown := sorted(set(asked.only) - set(names)):
        parser.error(f"--only={','.join(unknown)}: the sections are {', '.join(names)}.")
    if not asked.minutes > 0:
        parser.error(f"--minutes={asked.minutes:g}: it must be above 0.")
    return asked


def main(words=None) -> int:
    asked = parse(words)
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu_check: error: --out={asked.out} cannot be made ({error.strerror}).", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and so ends the section at work
    found = run(asked, asked.out)
    print(f"{verdict(found)}: {counts(found)}. Written: {asked.out}/report.md, log.txt")
    return 1 if verdict(found) == FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
