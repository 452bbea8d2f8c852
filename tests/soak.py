"""Disturbs runs at random: each must end as one that nobody touched."""

import argparse
import collections
import contextlib
import gc
import os
import pathlib
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jobs  # noqa: E402
import network  # noqa: E402
import small_disk  # noqa: E402
from soak_runs import DISTURBANCES, KINDS, Lost, Run  # noqa: E402

from tower_train import Config, train  # noqa: E402

TRIALS_OF_A_RUN = 11  # and its end


def trials_of_runs(kind, trials, minutes, draw, folder, disk, machines):
    """Disturbs runs of a kind, one after the other; each may be lost with the trial that it is in. Counts faults."""
    has = {"full disk": disk, "lost packets": machines}
    todo = [what for what, kinds in DISTURBANCES.items() if kind in kinds and has.get(what, True)]
    waiting = [what for _ in range(-(-trials // len(todo))) for what in draw.sample(todo, len(todo))][:trials]
    done, runs, faults, end = collections.Counter(), 0, 0, time.monotonic() + 60 * minutes
    while waiting and time.monotonic() < end:
        folder_of_run = folder / f"{kind}{len(waiting)}"
        with contextlib.closing(Run(KINDS[kind], draw, folder_of_run, disk, machines)) as run:
            what, runs = "the start", runs + 1
            try:
                run.await_step()
                for _ in range(TRIALS_OF_A_RUN):
                    if waiting and time.monotonic() < end:
                        done[what := waiting.pop()] += 1
                        run.disturb(what)
                done[what := draw.choice(["end", "end at last step"])] += 1
                getattr(run, what.replace(" ", "_"))()
            except (Lost, AssertionError, subprocess.TimeoutExpired) as error:
                faults += 1
                print(f"--- {kind}, {what}: {error}\n", flush=True)
        shutil.rmtree(run.train_dir, ignore_errors=True)
    counts = ", ".join(f"{what} {count}" for what, count in sorted(done.items()))
    print(f"{kind}: {done.total()} trials in {runs} runs ({counts}); lost, different or untrue: {faults}", flush=True)
    return faults


def endure(steps, train_dir):
    """Does one long run of short steps with everything on; returns whether neither memory nor open files grew."""
    memory, files = [], []

    def sample(step, report):
        if step % max(1, steps // 100) == 0:
            gc.collect()
            pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
            memory.append(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20)
            files.append(len(os.listdir("/proc/self/fd")))

    options = dict(summary_every_steps=100, save_every_steps=250, eval_every_steps=1000, log_every_steps=10)
    config = Config(train_dir=str(train_dir), **(jobs.TOY | options | dict(max_steps=steps)))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        seconds = train("toy_workload", config, after_step=sample).seconds
    second, last = (slice(20, 40), slice(-20, None))  # fifths: until then caches fill
    before, after = (statistics.median(memory[part]) for part in (second, last))
    print(
        f"{steps} steps in {seconds:.0f} s; memory {before:.1f} MiB in the second fifth, {after:.1f} in the last; "
        f"open files {max(files[second])}, {max(files[last])}"
    )
    return after - before < 10 and max(files[last]) <= max(files[second])  # allocators keep what they once had


def main(words=None):
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--cases", default="alone,plain,waiting,elastic", help="kinds of runs")
    parser.add_argument("--trials", type=int, default=20, help="of each case")
    parser.add_argument("--minutes", type=float, default=15, help="of each case at most")
    parser.add_argument("--seed", type=int, default=0, help="of what happens, not at which instruction it does")
    parser.add_argument("--steps", type=int, default=0, help="instead: of one long run that must not grow")
    asked = parser.parse_args(words)
    cases = asked.cases.split(",")
    if unknown := set(cases) - {*KINDS}:
        parser.error(f"--cases={asked.cases}: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}.")
    folder, faults = pathlib.Path(tempfile.mkdtemp(prefix="soak-")), 0
    if asked.steps:
        return 0 if endure(asked.steps, folder / "run") else 1
    for case in cases:
        draw = random.Random(f"{asked.seed} {case}")
        with contextlib.ExitStack() as stack:
            has_disk = case == "alone" and small_disk.can_mount(folder / "disk")
            disk = stack.enter_context(small_disk.mounted(folder / "disk", 64)) if has_disk else None
            has_network, workers = network.can_make() and case != "alone", KINDS[case].workers
            machines = stack.enter_context(contextlib.closing(network.Network(workers + 1))) if has_network else None
            faults += trials_of_runs(case, asked.trials, asked.minutes, draw, folder, disk, machines)
    if faults:
        print(f"What is left of it: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, resource.getrlimit(resource.RLIMIT_DATA)[1]))  # of each start
    sys.exit(main())
