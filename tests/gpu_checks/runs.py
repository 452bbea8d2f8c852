"""Whole runs, as processes: those that must end with the same variables, and what they take of the GPUs' memory."""

import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import tensorflow as tf

from gpu_checks import trials
from gpu_checks.findings import attempt, check, unchecked

_STEPS, _SECS_EACH = 6, 25  # about what a pair may take
_EXACT = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, batch_size=8, num_gpus=1)
_UNTOUCHED_MEGABYTES = 32  # of noise
_START_SECS = 90
_MOST = 0.5  # of a card: memory that grows with the need of a small network


class Pair(NamedTuple):
    """Two runs that must be equal.

    Attributes:
      one, other: the options of each, beside _EXACT.
      gpus: that it takes.
      on_cpus: whether it says something on logical CPU devices where there is no GPU.
      first_steps: of the one, which then goes on; 0: it is done at once.
      workers: of the one.
      tolerance: the greatest difference, relative to a variable's greatest number.
    """

    one: dict
    other: dict
    gpus: int
    on_cpus: bool = True
    first_steps: int = 0
    workers: int = 1
    tolerance: float = 1e-9


_REPEATED = dict(dtype="float32", deterministic=True, batch_size=128)
_MIRRORED = dict(num_gpus=1, variable_update="mirrored")
_SYNCED = dict(model="resnet20", num_gpus=2, sync_batch_norm=True, batch_size=4)
_NCCL = _MIRRORED | dict(all_reduce="nccl")
PAIRS = {
    "a network on a GPU is that on the CPU": Pair(dict(device="gpu"), dict(device="cpu"), 1, on_cpus=False),
    "variables on a whole card are those on the host": Pair(_MIRRORED, dict(variable_update="cpu"), 1, on_cpus=False),
    "a resumed run with staged examples is a whole one": Pair({}, {}, 1, first_steps=_STEPS // 2),
    "copies that are compared after each step": Pair(
        _MIRRORED | dict(num_gpus=2, check_mirrors_every_steps=1, batch_size=4), {}, 2
    ),
    "synchronised batch normalisation": Pair(_SYNCED, dict(model="resnet20"), 2),
    "two runs with --deterministic, to the bit": Pair(_REPEATED, _REPEATED, 1, tolerance=0.0),
    "two workers": Pair(dict(batch_size=4), {}, 1, workers=2),
    "two workers with NCCL between them": Pair(_NCCL | dict(batch_size=4), {}, 2, on_cpus=False, workers=2),
    "two workers of two GPUs each with NCCL between them": Pair(
        _NCCL | dict(num_gpus=2, batch_size=2), {}, 4, on_cpus=False, workers=2
    ),
}


def equal(settings):
    here = len(trials.gpus())
    for number, (what, pair) in enumerate(PAIRS.items()):
        if here < pair.gpus and (here or not pair.on_cpus):
            unchecked(what, f"GPUs that it needs: {pair.gpus}; there are {here}")
        elif settings.left() < _SECS_EACH:
            unchecked(what, "no time was left")
        else:
            with attempt(what):
                one = _train(settings, f"one-{number}", pair.one, pair.first_steps, pair.workers)
                trials.compare(what, one, _train(settings, f"other-{number}", pair.other), pair.tolerance)
    with attempt("float16"):
        words = dict(num_gpus=1, dtype="float16", max_steps=50 if here else 3, batch_size=8)
        output = trials.command("tower_train", *trials.training_words(settings, "float16", **words), settings=settings)
        check("Stopped by last step" in output, "a run in float16 with its loss scale ends well")


def _train(settings, name, options, first_steps=0, workers=1) -> dict:
    """{variable: value} after the last step of a run."""
    for steps in filter(None, (first_steps, _STEPS)):
        words = trials.training_words(settings, name, **(_EXACT | options), max_steps=steps, check_towers="never")
        if workers == 1:
            trials.command("tower_train", *words, settings=settings)
        else:
            script = pathlib.Path(__file__).parents[2] / "scripts" / "local_cluster.py"
            start = [sys.executable, script, f"--workers={workers}", *words]
            subprocess.run(start, check=True, timeout=max(5.0, settings.left()))
    reader = tf.train.load_checkpoint(f"{settings.scratch}/{name}/model.ckpt-{_STEPS}")
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def memory(settings):
    """Cards that were not asked for stay untouched, and an evaluation fits beside a training."""
    count = len(trials.gpus())
    if not trials.megabytes("memory.used"):
        unchecked("memory of GPUs", "nvidia-smi does not tell it; a training with an evaluation beside it")
    with attempt("one tower, and an evaluation beside it"):
        _train_beside(settings, "num_gpus", 1, used={0})
    if count > 1:
        with attempt("--gpus=1,0"):
            _train_beside(settings, "gpus", "1,0", used={0, 1})
    else:
        unchecked("--gpus=1,0", "it needs two GPUs")


def _train_beside(settings, option, value, used):
    """Trains until all has been looked at."""
    name, folder, before = f"training with --{option}={value}", f"memory-{option}", trials.megabytes("memory.used")
    words = dict(max_steps=10**9, batch_size=128, save_every_steps=100) | {option: value}
    words = trials.training_words(settings, folder, **words)
    trainer = subprocess.Popen([sys.executable, "-m", "tower_train", *words])
    try:
        deadline = time.monotonic() + min(_START_SECS, settings.left())
        while not pathlib.Path(settings.scratch, folder, "checkpoint").exists():
            if trainer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training has saved nothing (status {trainer.returncode})")
            time.sleep(0.1)
        after, total = trials.megabytes("memory.used"), trials.megabytes("memory.total")
        if before and after and total:
            grown = [now - then for then, now in zip(before, after, strict=True)]
            needed = all(0 < grown[i] < _MOST * total[i] for i in used)
            alone = all(grown[i] <= _UNTOUCHED_MEGABYTES for i in range(len(grown)) if i not in used)
            check(needed and alone, f"{name}: takes what it needs of its GPUs, and no others", megabytes=grown)
        output = trials.command("tower_train.evaluate", f"--train_dir={settings.scratch}/{folder}", settings=settings)
        together = trials.megabytes("memory.used")
        check("precision @ 1" in output, f"{name}: an evaluation fits beside it", megabytes=together)
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(max(5.0, settings.left()))
        check(status == 128 + signal.SIGTERM, f"{name} ends when it is told to", status=status)
    finally:
        trainer.kill()
        trainer.wait()
