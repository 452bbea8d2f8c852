"""Thousands of strange command lines, environments of a cluster and files of a run: one line, or no harm.

scripts/fuzz [--cases N] [--seed S] [--only command_line,environment,run_files] prints figures and what went wrong, and
leaves with 0 if nothing did: no traceback, no crash, no hang, no exit status but those that are documented. Every case
is a process of its own, forked from one that has imported TensorFlow.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fuzz_cases  # noqa: E402
import jobs  # noqa: E402
import toy_workload  # noqa: E402, F401

from tower_train import __main__  # noqa: E402
from tower_train.options import command_line  # noqa: E402
from tower_train.run.train import train  # noqa: E402, F401

LIMIT_SECS, LEAVING_SECS = 40, 30
MOST_BYTES = 8 * 2**30  # of a case's memory
DOCUMENTED = {0, 2, 3, 4, 5, 138}
TOLD_TO_END = 143
STACKS_SIGNAL = signal.SIGUSR2
MOST_SHOWN = 2000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a case: its exit status, or minus a signal's number; what it said; whether it had to be killed."""

    status: int
    output: str
    is_stuck: bool

    @property
    def fault(self):
        """Says what is wrong with it; empty if nothing is."""
        if self.is_stuck:
            return "stuck"
        if self.status not in (*DOCUMENTED, TOLD_TO_END):
            return f"status {self.status}"
        if "Traceback" in self.output:
            return "traceback"
        mistakes = self.output.count("tower_train: error: ")
        last_line = self.output.rstrip("\n").rpartition("\n")[2]
        if self.status and self.status != TOLD_TO_END and (mistakes != 1 or "tower_train: error: " not in last_line):
            return f"status {self.status} without one line"
        return ""


def run(case, folder):
    """Runs a case in a folder; returns its Outcome."""
    path = folder / "output"
    process = os.fork()
    if not process:
        _become(case, folder, path)
    try:
        is_stuck = False
        if (status := _wait(process, LIMIT_SECS)) is None:
            os.kill(process, signal.SIGTERM)  # it may train for ever, and rightly so
            status = _wait(process, LEAVING_SECS)
            is_stuck = status != TOLD_TO_END
        if status is None:
            os.kill(process, STACKS_SIGNAL)
            time.sleep(1)
    finally:
        if status is None:
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return Outcome(status, path.read_text(errors="replace") if path.exists() else "", is_stuck)


def _wait(process, secs):
    """The exit status of a process; None if it goes on for so long."""
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    return None


def _become(case, folder, output):
    """Makes of this process the one that the case is about; does not return."""
    status = 99
    try:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        os.environ.update(case.environment)
        sys.argv[:] = ["tower_train", *case.words]
        faulthandler.disable()
        faulthandler.register(STACKS_SIGNAL)
        command_line.run(case.main)
    except SystemExit as left:
        status = left.code
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def fuzz(kind, count, seed, folder, run_dir):
    """Runs `count` cases of a kind; returns (Counter of statuses, {fault: [(case, outcome)]})."""
    statuses, faults = collections.Counter(), collections.defaultdict(list)
    for number in range(count):
        draw = random.Random(f"{kind} {seed} {number}")
        place = folder / f"{kind}{number}"
        place.mkdir()
        case = fuzz_cases.KINDS[kind](draw, place, run_dir)
        outcome = run(case, place)
        statuses[outcome.status] += 1
        if outcome.fault:
            last_line = outcome.output.rstrip("\n").rpartition("\n")[2]
            faults[f"{outcome.fault}: {last_line[:80]}"].append((number, case, outcome))
        shutil.rmtree(place)
    return statuses, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(fuzz_cases.KINDS))
    asked = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    run_dir = make_run(folder / "run")
    is_well = True
    for kind in asked.only.split(","):
        began = time.monotonic()
        statuses, faults = fuzz(kind, asked.cases, asked.seed, folder, run_dir)
        listed = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        count = sum(map(len, faults.values()))
        secs = time.monotonic() - began
        print(
            f"fuzz: {kind}, seed {asked.seed}, {asked.cases} cases in {secs:.0f} s, statuses {listed}; {count} faults"
        )
        for fault, found in faults.items():
            number, case, outcome = found[0]
            print(f"--- {len(found)} times {fault}\nfirst: number {number}, {case}\n{outcome.output[-MOST_SHOWN:]}")
        sys.stdout.flush()
        is_well &= not faults
    shutil.rmtree(folder)
    return 0 if is_well else 1


def make_run(folder):
    """A finished run with all kinds of files, trained in another process, so that this one has no threads."""
    words = jobs.toy_flags(folder, max_steps=40, summary_every_steps=20, eval_every_steps=20, keep_best=True)
    outcome = run(fuzz_cases.Case(__main__.main, tuple(words)), folder.parent)
    assert outcome.status == 0, outcome.output
    return folder


if __name__ == "__main__":
    sys.exit(main())
