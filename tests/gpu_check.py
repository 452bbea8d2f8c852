"""Checks and measures everything on a machine with GPUs, and reports what was done and what could not be.

scripts/gpu_check [--out=DIR] [--minutes=8] [--quick] [--only=SECTION,...]

Each section is a process of its own with a time limit, so that one that crashes or hangs is a line of the report. DIR
gets report.md, report.json and log.txt, rewritten after each section. Without a GPU the sections do what they can on
the CPU and name the rest; --quick: only what is cheap there. Exit status: 0 nothing failed, 1 something did, 2 a wrong
option.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

from gpu_checks import findings as results

TESTS = pathlib.Path(__file__).parent
_LEAST_SECS = 12  # less is not worth a start
_SLACK = 1.6  # times its share a section may take; what it leaves the others have


@dataclasses.dataclass(frozen=True)
class Section:
    """One section: its name, its function, its description, its seconds on a machine with GPUs; and whether --quick has
    it, since it is cheap on CPUs too."""

    name: str
    function: str
    about: str
    seconds: int
    is_quick: bool = False


SECTIONS = (
    Section("machine", "gpu_checks.machine:check", "GPUs, driver, libraries, first kernels", 60, True),
    Section("towers", "gpu_checks.towers:on_one_card", "several towers on one card against one, in float64", 45, True),
    Section("cards", "gpu_checks.towers:on_several_cards", "several cards against one, in float64", 45),
    Section("means", "gpu_checks.towers:known_means", "each all-reduce on numbers whose means are known", 15, True),
    Section("memory", "gpu_checks.memory:check", "memory of GPUs, an evaluation beside a training", 40),
    Section("runs", "gpu_checks.runs:check", "workers, resumes, places, GPU against CPU, in float64", 90),
    Section("fronts", "gpu_checks.fronts:check", "multi_gpu_model and Estimators", 35),
    Section("benchmark", "gpu_checks.benchmark:check", "beside Keras, the port and the ceiling of a card", 80),
    Section("placement", "gpu_checks.placement:check", "kernels and traffic of each kind of training", 60),
)


@dataclasses.dataclass
class Outcome:
    section: Section
    findings: list[dict]
    seconds: float
    limit: float

    @property
    def verdict(self) -> str:
        """The worst of its findings; being measured is as good as ok."""
        there = {finding["verdict"] for finding in self.findings}
        if results.FAILED in there:
            return results.FAILED
        return results.OK if there & {results.OK, results.MEASURED} else results.UNCHECKED

    def count(self, verdict: str) -> int:
        return sum(finding["verdict"] == verdict for finding in self.findings)


def start(function: str, settings: str, log: pathlib.Path) -> subprocess.Popen:
    """Starts a section's process, whose output is added to the log."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_CACHE_MAXSIZE": str(4 << 30), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with open(log, "a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "gpu_checks", function, settings], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=defaults | os.environ | {"PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip


def run_section(
    section: Section, limit: float, quick: bool, shared: pathlib.Path, log: pathlib.Path, compiles: bool
) -> Outcome:
    """Runs a section for so many seconds at most; `compiles`: on GPUs whose kernels TensorFlow first compiles."""
    scratch = shared / section.name
    scratch.mkdir()
    written, data_dir = str(scratch / "findings.jsonl"), str(shared / "data")
    settings = dict(seconds=limit, quick=quick, scratch=str(scratch), data_dir=data_dir, findings=written)
    began = time.monotonic()
    with open(log, "a") as file:
        file.write(f"\n===== {section.name} =====\n")
    process, status = start(section.function, json.dumps(settings), log), None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()
        process.wait()
    found = results.read(written)
    if status is None and compiles:
        why = f"its {limit:.0f} s went into compiling kernels: start again, which finds them, or give --minutes=40"
        found += _unchecked(section, why).findings
    elif status != 0:
        why = f"left with status {status}" if status else f"was ended after {limit:.0f} s, its time limit"
        found.append({"verdict": results.FAILED, "what": f"its process {why}; see the end of log.txt", "numbers": {}})
    return Outcome(section, found, time.monotonic() - began, limit)


def _unchecked(section: Section, why: str) -> Outcome:
    finding = {"verdict": results.UNCHECKED, "what": section.about, "numbers": {"why": why}}
    return Outcome(section, [finding], 0.0, 0.0)


def run(asked, out: pathlib.Path) -> list[Outcome]:
    """Runs the sections, writes the report after each, and prints how it goes."""
    log, outcomes = out / "log.txt", []
    log.write_text("")
    end = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as shared:
        shared = pathlib.Path(shared)
        waiting = [section for section in SECTIONS if section.name in asked.only]
        while waiting:
            share = waiting[0].seconds / sum(section.seconds for section in waiting)
            section, left = waiting.pop(0), end - time.monotonic()
            print(f"{len(outcomes) + 1}/{len(asked.only)} {section.name}: {section.about} ...", flush=True)
            if asked.quick and not section.is_quick:
                last = _unchecked(section, "--quick; the tests have it on CPUs")
            elif left < _LEAST_SECS:
                last = _unchecked(section, "no time was left")
            else:
                limit = min(left, max(_LEAST_SECS, _SLACK * share * left))
                last = run_section(section, limit, asked.quick, shared, log, compile_first(outcomes))
            outcomes.append(last)
            for finding in last.findings:
                if finding["verdict"] == results.FAILED:
                    print(f"    {results.shown(finding)}")
            counts = [f"{count} {verdict}" for verdict in results.VERDICTS if (count := last.count(verdict))]
            print(f"    {last.verdict} ({', '.join(counts)}), {last.seconds:.0f} s", flush=True)
            write(out, outcomes, len(asked.only))
    return outcomes


def compile_first(outcomes: list[Outcome]) -> bool:
    """Returns whether a section has found a GPU that TensorFlow has no binaries for."""
    return any(each["numbers"].get("kernels") == results.COMPILED for one in outcomes for each in one.findings)


def write(out: pathlib.Path, outcomes: list[Outcome], sections: int) -> None:
    """Writes the report, of so many sections in all."""
    records = [dataclasses.asdict(each) | {"verdict": each.verdict} for each in outcomes]
    (out / "report.json").write_text(json.dumps(records, indent=1) + "\n")
    counts = ", ".join(f"{sum(each.count(verdict) for each in outcomes)} {verdict}" for verdict in results.VERDICTS)
    lines = [
        f"# gpu_check: {overall(outcomes)}", "",
        f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} on {platform.node()}, {' '.join(sys.argv[1:])}: {counts}. "
        f"{len(outcomes)} of {sections} sections done.", "",
        f"| section | verdict | {' | '.join(results.VERDICTS)} | seconds | limit |", "| --- " * 8 + "|",
    ]  # fmt: skip
    for each in outcomes:
        numbers = " | ".join(str(each.count(verdict)) for verdict in results.VERDICTS)
        lines.append(f"| {each.section.name} | {each.verdict} | {numbers} | {each.seconds:.0f} | {each.limit:.0f} |")
    for each in outcomes:
        lines += ["", f"## {each.section.name}: {each.section.about}", ""]
        lines += [f"- {results.shown(finding)}" for finding in each.findings]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def overall(outcomes: list[Outcome]) -> str:
    return results.FAILED if any(each.verdict == results.FAILED for each in outcomes) else results.OK


def parse(words):
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}"))
    parser.add_argument("--minutes", type=float, default=8.0, help="of all sections together (8)")
    parser.add_argument("--quick", action="store_true", help="only what is cheap on CPUs")
    parser.add_argument("--only", default="", help=f"of {', '.join(section.name for section in SECTIONS)}")
    asked = parser.parse_args(words)
    names = [section.name for section in SECTIONS]
    asked.only = [name for name in asked.only.split(",") if name] or names
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
    outcomes = run(asked, asked.out)
    unchecked = sum(each.count(results.UNCHECKED) for each in outcomes)
    print(f"{overall(outcomes)}; {unchecked} not checked. Written: {asked.out}/report.md, report.json, log.txt")
    return 1 if overall(outcomes) == results.FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
