"""Kills, damage and full disks at random, each followed by a resume; at the end the run must be the one nobody touched.

scripts/soak [--minutes M] [--seed S] prints one line of figures and leaves with 0 if nothing was lost or repeated. The
seed fixes the kinds and the places of faults; at which instruction a signal arrives no seed can fix.

scripts/soak --workers N does so to the workers of a cluster, and stops and continues them, see soak_cluster.py.

scripts/soak --workers N --elastic MIN:MAX lets them return later, see soak_elastic.py.

scripts/soak --steps N does N steps undisturbed instead, and leaves with 0 if neither memory nor open files grew.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import endurance  # noqa: E402
import jobs  # noqa: E402
import numpy as np  # noqa: E402
import small_disk  # noqa: E402
import soak_cluster  # noqa: E402
import soak_elastic  # noqa: E402
import soak_workload  # noqa: E402
import tensorflow as tf  # noqa: E402

from tower_train import train  # noqa: E402

OPTIONS = jobs.TOY | dict(summary_every_steps=10, save_every_steps=10, keep_checkpoints=4, eval_every_steps=70)
GLOBAL_BATCH = OPTIONS["num_gpus"] * OPTIONS["batch_size"]
DISK_MEGABYTES = 64
KILLS = {signal.SIGKILL: 8, signal.SIGTERM: 1, signal.SIGINT: 1}  # and how often, in proportion
FAULTS_PER_KILL = 0.35
PATIENCE_SECS = 120


class LogStart(tf.compat.v1.train.SessionRunHook):
    """Logs at which step a start begins."""

    def after_create_session(self, session, coord):
        soak_workload.write_line(f"start {session.run(tf.compat.v1.train.get_global_step(session.graph))}")


def start(train_dir, max_steps=jobs.ENDLESS):
    """A trainer in a forked process, which need not import TensorFlow again; returns its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open(os.environ[soak_workload.LOG] + ".output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        options = OPTIONS | dict(train_dir=str(train_dir), max_steps=max_steps)
        train(soak_workload.WORKLOAD, jobs.Config(**options), [LogStart()])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Log:
    """Reads what towers were trained on from the log: every batch of the path that leads to the newest state, once."""

    def __init__(self, path):
        self._file = open(path, "a+b")
        self._file.seek(0)
        self._batches, self.starts, self.repeated, self.steps_again = {}, 0, 0, 0

    def read_on(self):
        """Takes in what was written since; returns whether there was a batch."""
        trained = False
        for line in self._file.readlines():
            kind, first, *count = line.split()
            if kind == b"start":
                self.starts += 1
                # What was trained after the checkpoint is given up, and trained again.
                gone = [position for position in self._batches if position >= int(first) * GLOBAL_BATCH]
                self.steps_again += len({position // GLOBAL_BATCH for position in gone})
                for position in gone:
                    del self._batches[position]
            else:
                trained = True
                self.repeated += int(count[0]) * (int(first) in self._batches)
                self._batches[int(first)] = int(count[0])
        return trained

    @property
    def last_step(self):
        return max(self._batches, default=0) // GLOBAL_BATCH

    def lost(self, steps):
        """Counts the examples of the first steps that were not trained on."""
        taken = sum(count for position, count in self._batches.items() if position < steps * GLOBAL_BATCH)
        return steps * GLOBAL_BATCH - taken


class Faults:
    """Things that go wrong with the files of a run, between its starts or under it."""

    def __init__(self, draw, train_dir, disk):
        self._draw, self._train_dir, self._disk = draw, train_dir, disk
        self.counts = collections.Counter()

    def between(self):
        """Damages the newest checkpoint, or TensorFlow's list of them, or leaves something over."""
        kind = self._draw.choice(["flipped bit", "truncated", "emptied", "missing data", "list", "leftovers"])
        indices = sorted(self._train_dir.glob("model.ckpt-*.index"), key=lambda path: int(path.stem.split("-")[1]))
        if kind == "list" and indices:
            (self._train_dir / "checkpoint").write_bytes(self._draw.randbytes(self._draw.randrange(60)))
        elif kind == "leftovers":
            (self._train_dir / f"model.ckpt-{jobs.ENDLESS}.data-00000-of-00001").write_bytes(b"half")
        elif len(indices) < 3:
            return
        else:
            data = indices[-1].with_suffix(".data-00000-of-00001")
            self._damage(kind, data if kind == "missing data" else self._draw.choice([indices[-1], data]))
        self.counts[kind] += 1

    def _damage(self, kind, path):
        size = path.stat().st_size
        if kind == "missing data":
            path.unlink()
        elif kind == "flipped bit":
            content = bytearray(path.read_bytes())
            content[self._draw.randrange(size)] ^= 1 << self._draw.randrange(8)
            path.write_bytes(content)
        else:
            os.truncate(path, self._draw.randrange(1, size) if kind == "truncated" else 0)

    @contextlib.contextmanager
    def full_disk(self, process):
        """Within this block nothing more can be written into the train_dir."""
        self.counts["full disk"] += 1
        if self._disk:
            filler = small_disk.fill(self._disk)
            yield
            filler.unlink()
            return
        before = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (0, before[1]))
        yield
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, before)


def one_start(draw, train_dir, log, faults):
    """Starts the trainer, lets it train a while, and ends it; returns (signal, seconds to its first step or None)."""
    began = time.monotonic()
    process = start(train_dir)
    try:
        first_step = let_train(draw, process, began, log, faults)
        number = draw.choices(list(KILLS), KILLS.values())[0]
        if draw.random() < 0.1:
            os.kill(process, signal.SIGUSR1)
        os.kill(process, number)
        wait(process)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        raise
    log.read_on()
    return number, first_step


def let_train(draw, process, began, log, faults):
    """Lets a trainer train for a while, and sometimes fills its disk; returns the seconds to its first step or None."""
    # Most live until some time after their first step, and some are killed before it.
    deadline = began + draw.uniform(0, 1) if draw.random() < 0.1 else None
    first_step = None
    while deadline is None or time.monotonic() < deadline:
        if log.read_on() and first_step is None:
            first_step = time.monotonic() - began
            deadline = deadline or time.monotonic() + draw.uniform(0, 0.6)
            if draw.random() < FAULTS_PER_KILL / 3:
                with faults.full_disk(process):
                    time.sleep(draw.uniform(0.05, 0.4))
                    if draw.random() < 0.5:
                        break
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended or time.monotonic() > began + PATIENCE_SECS:
            output = pathlib.Path(os.environ[soak_workload.LOG] + ".output").read_text()
            raise SystemExit(f"the trainer ended by itself or is stuck:\n{output}")
        time.sleep(0.005)
    return first_step


def mismatches(folder, other, steps):
    """Counts the variables and metrics of two runs that differ in any bit."""
    one, two = jobs.variables(folder, steps), jobs.variables(other, steps)
    differing = [name for name in one.keys() | two.keys() if not np.array_equal(one.get(name), two.get(name))]
    logged = {record["step"]: record for record in jobs.metrics_but_times(other)}
    records = jobs.metrics_but_times(folder)
    doubled = len(records) - len({record["step"] for record in records})
    return len(differing) + doubled + sum(record != logged.get(record["step"]) for record in records)


def soak(minutes, seed, folder, disk):
    """Returns (figures in one line, whether all is well)."""
    draw, train_dir = random.Random(seed), (disk or folder) / "run"
    os.environ[soak_workload.LOG] = str(folder / "log")
    log, kills, times = Log(folder / "log"), collections.Counter(), []
    faults = Faults(draw, train_dir, disk)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        number, first_step = one_start(draw, train_dir, log, faults)
        kills[number.name] += 1
        times += [first_step] if first_step else []
        if draw.random() < FAULTS_PER_KILL:
            faults.between()
    last_step = log.last_step + 20
    ends = [wait(start(train_dir, last_step))]
    log.read_on()
    lost, repeated, again, resumes = log.lost(last_step), log.repeated, log.steps_again, log.starts - 1
    os.environ[soak_workload.LOG] = str(folder / "other log")
    ends.append(wait(start(folder / "undisturbed", last_step)))
    differing = mismatches(train_dir, folder / "undisturbed", last_step) if not any(ends) else -1
    return (
        f"soak: seed {seed}, {last_step} steps, {sum(kills.values())} kills ({_listed(kills)}), "
        f"{faults.counts.total()} other faults ({_listed(faults.counts)}), {resumes} resumes, {again} steps lost and "
        f"trained again, {lost} examples lost, {repeated} repeated, {differing} mismatches, "
        f"first resumed step after at most {max(times, default=0):.1f} s"
    ), not any(ends) and lost == repeated == differing == 0


def _listed(counts):
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--elastic", default="")
    parser.add_argument("--steps", type=int, default=0)
    asked = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    if asked.steps:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            line, is_well = endurance.endure(asked.steps, folder / "run")
        print(line)
        shutil.rmtree(folder)
        return 0 if is_well else 1
    if asked.elastic:
        line, is_well = soak_elastic.soak(asked.minutes, asked.seed, asked.workers, asked.elastic, folder)
        return conclude(line, is_well, folder)
    if asked.workers > 1:
        line, is_well = soak_cluster.soak(asked.minutes, asked.seed, asked.workers, folder)
        return conclude(line, is_well, folder)
    with contextlib.ExitStack() as stack:
        can_mount = small_disk.can_mount(folder / "disk")
        disk = stack.enter_context(small_disk.mounted(folder / "disk", DISK_MEGABYTES)) if can_mount else None
        line, is_well = soak(asked.minutes, asked.seed, folder, disk)
    return conclude(line + ("" if disk else " (full disks by RLIMIT_FSIZE)"), is_well, folder)


def conclude(line, is_well, folder):
    """Says how it went; returns the exit status."""
    print(line)
    if is_well:
        shutil.rmtree(folder)
    else:
        print(f"What is left of it: {folder}", file=sys.stderr)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
