"""One long run of short steps, with everything on: does anything grow with its length?"""

import gc
import os
import statistics

import jobs
import tensorflow as tf

_SAMPLES = 100
_SETTLED = 0.2  # of the run: until then caches fill
_MOST_GROWTH_BYTES = 10 * 2**20  # of noise: allocators keep what they once had
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Samples(tf.compat.v1.train.SessionRunHook):
    """Looks at this process every few steps.

    Attributes:
      resident: bytes of memory in use.
      descriptors: open files.
    """

    def __init__(self, steps):
        self._every, self._count = max(1, steps // _SAMPLES), 0
        self.resident, self.descriptors = [], []

    def after_run(self, run_context, run_values):
        self._count += 1
        if self._count % self._every == 0:
            gc.collect()
            with open("/proc/self/statm") as file:
                self.resident.append(int(file.read().split()[1]) * _PAGE_BYTES)
            self.descriptors.append(len(os.listdir("/proc/self/fd")))


def endure(steps, train_dir):
    """Returns (figures in one line, whether neither memory nor open files grew)."""
    options = dict(summary_every_steps=100, save_every_steps=250, eval_every_steps=1000, log_every_steps=10)
    samples = Samples(steps)
    result = jobs.train_toy(train_dir, [samples], max_steps=steps, **options)
    early, late = slice(int(_SETTLED * _SAMPLES), int(2 * _SETTLED * _SAMPLES)), slice(-int(_SETTLED * _SAMPLES), None)
    before, after = (statistics.median(samples.resident[part]) for part in (early, late))
    files_before, files_after = (max(samples.descriptors[part]) for part in (early, late))
    return (
        f"endurance: {result.step} steps in {result.seconds:.0f} s, with {steps // 100} summaries, {steps // 250} "
        f"checkpoints and {steps // 1000} evaluations; memory {before / 2**20:.1f} MiB in the second fifth, "
        f"{after / 2**20:.1f} in the last; open files {files_before}, {files_after}"
    ), after - before < _MOST_GROWTH_BYTES and files_after <= files_before
