"""An elastic cluster whose workers are killed, stopped and told to end at random, and return later, at random too.

Every round trains the same steps, which one process trains too that nobody touches; the weights must be the same to
1e-9, and every example of every step that counts trained on once.
"""

import collections
import os
import random
import re
import shutil
import signal
import time

import elastic_log
import forked
import jobs
import numpy as np
import soak_cluster
import soak_workload

STEPS = 100  # of a run
TIMEOUT_SECS = 4
BATCH = 3  # of a worker where all are there
OPTIONS = dict(
    workload="soak_workload:ELASTIC", dtype="float64", optimizer="momentum", learning_rate=0.05, clip_gradients=0.5,
    moving_average_decay=0.9, num_gpus=1, batch_size=BATCH, log_every_steps=1, summary_every_steps=0,
    save_every_steps=10, keep_checkpoints=4, check_data=False, max_steps=STEPS,
)  # fmt: skip
LATEST_SECS = 40  # after which a worker returns


class Round(soak_cluster.Round):
    """One run from its beginning to its end; as soak_cluster's, but workers stay away for a while."""

    FAULTS = {"kill": 10, "kill several": 2, "kill chief": 1, "stop": 3, "SIGTERM": 4, "SIGUSR1": 1}

    def __init__(self, draw, folder, workers, counts, elastic):
        super().__init__(draw, folder, workers, counts)
        self.log, self.options = folder / "log", OPTIONS | dict(
            elastic=elastic, worker_timeout_secs=TIMEOUT_SECS, stall_timeout_secs=60,
        )  # fmt: skip
        self._returns = {}  # {worker: when}

    def environment(self, index):
        pause_secs = str(self._draw.choice([0.02, 0.1]))
        return {soak_workload.LOG: str(self.log), soak_workload.PAUSE_SECS: pause_secs, forked.FORK_AGAIN: "1"}

    def _kill(self, *indices):
        for index in indices or self._some(1):
            self._end(index, signal.SIGKILL)
            self._stay_away(index)

    def _kill_several(self):
        self._kill(*self._some(2))

    def _kill_chief(self):
        self._kill(0)

    def _sigterm(self):
        for index in self._some(1):
            self._end(index, signal.SIGTERM)
            self._stay_away(index)

    def _some(self, count):
        """Workers that are there, but for the chief."""
        there = [index for index in self._running if index]
        return self._draw.sample(there, min(count, len(there)))

    def _stay_away(self, index):
        del self._running[index]
        self._returns[index] = time.monotonic() + self._draw.choice([0, 5, LATEST_SECS]) * self._draw.random()

    def look(self):
        for index, when in list(self._returns.items()):
            if time.monotonic() > when:
                del self._returns[index]
                self._start(index)

    def _any(self):
        there = list(self._running)
        return self._draw.choice(there) if there else self._return_one()

    def _return_one(self):
        index = min(self._returns, key=self._returns.get)
        del self._returns[index]
        self._start(index)
        return index

    def _note_end(self, worker):
        super()._note_end(worker)
        for size in re.findall(r"^elastic:  (\d+) of", worker.text, re.MULTILINE):
            self._counts[f"starts of {size}"] += 1


def soak(minutes, seed, workers, elastic, folder):
    """Returns (figures in one line, whether all is well)."""
    draw, counts, jobs.WAIT_SECS = random.Random(seed), collections.Counter(), soak_cluster.PATIENCE_SECS
    most = int(elastic.partition(":")[2])
    os.environ[soak_workload.LOG] = str(folder / "log of the undisturbed")
    jobs.train_toy(folder / "undisturbed", **(OPTIONS | dict(accumulate_steps=most)))
    began, rounds, faults, lost = time.monotonic(), 0, [0, 0], []
    while time.monotonic() < began + 60 * minutes:
        each = Round(draw, folder / f"round{rounds}", workers, counts, elastic)
        rounds += 1
        try:
            each.run()
        except soak_cluster.Lost as error:
            lost.append(str(error))
            print(f"round {rounds - 1}: {error}", flush=True)
            continue
        found = differences(each, folder / "undisturbed", most * BATCH)
        faults = [sum(both) for both in zip(faults, found, strict=True)]
        print(f"round {rounds - 1}: {dict(counts)}, {found[0]} examples lost or repeated, {found[1]} mismatches",
              flush=True)  # fmt: skip
        if not any(found):
            shutil.rmtree(folder / f"round{rounds - 1}")
    listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    minutes = (time.monotonic() - began) / 60
    return (
        f"soak of {workers} workers, --elastic={elastic}: seed {seed}, {minutes:.0f} minutes, {rounds} runs of {STEPS} "
        f"steps, {listed}; {len(lost)} runs lost, {faults[0]} examples lost or repeated, {faults[1]} mismatches"
    ), not lost and not any(faults)


def differences(finished, undisturbed, global_batch):
    """Counts the examples that were not trained on exactly once, and the variables and losses that differ."""
    found, _ = elastic_log.trained(finished.log, global_batch, STEPS)
    counted = collections.Counter(position for positions in found.values() for position in positions)
    wrong = sum(counted[position] != 1 for position in range(STEPS * global_batch)) + len(found) - STEPS
    one, two = (jobs.variables(folder, STEPS) for folder in (finished.train_dir, undisturbed))
    differing = sum(
        name not in one or name not in two or not np.allclose(one[name], two[name], rtol=1e-9, atol=1e-12)
        for name in one.keys() | two.keys()
    )
    records = [[(record["examples"], record["loss"]) for record in jobs.metrics(folder)]
               for folder in (finished.train_dir, undisturbed)]  # fmt: skip
    if np.shape(records[0]) != np.shape(records[1]) or not np.allclose(*records, rtol=1e-9, atol=0):
        differing += 1
    return wrong, differing
