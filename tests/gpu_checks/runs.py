"""Whole runs that must end with the same variables, as processes of their own: devices, places, workers, resumes."""

import pathlib
import subprocess
import sys
from typing import NamedTuple

import tensorflow as tf

from gpu_checks import trials

_STEPS, _SECS_EACH = 6, 25  # about what a pair may take
_EXACT = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, batch_size=8, num_gpus=1)


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
PAIRS = {
    "a network on a GPU is that on the CPU": Pair(dict(device="gpu"), dict(device="cpu"), 1, on_cpus=False),
    "variables on a whole card are those on the host": Pair(_MIRRORED, dict(variable_update="cpu"), 1, on_cpus=False),
    "a resumed run with staged examples is a whole one": Pair({}, {}, 1, first_steps=_STEPS // 2),
    "copies that are compared after each step": Pair(
        _MIRRORED | dict(num_gpus=2, check_mirrors_every_steps=1, batch_size=4), {}, 2
    ),
    "synchronised batch normalisation": Pair(
        dict(num_gpus=2, model="resnet20", sync_batch_norm=True, batch_size=4), dict(model="resnet20"), 2
    ),
    "two runs with --deterministic, to the bit": Pair(_REPEATED, _REPEATED, 1, tolerance=0.0),
    "two workers": Pair(dict(batch_size=4), {}, 1, workers=2),
    "two workers with NCCL between them": Pair(
        _MIRRORED | dict(all_reduce="nccl", batch_size=4), {}, 2, on_cpus=False, workers=2
    ),
    "two workers of two GPUs each with NCCL between them": Pair(
        _MIRRORED | dict(num_gpus=2, all_reduce="nccl", batch_size=2), {}, 4, on_cpus=False, workers=2
    ),
}


def check(findings, settings):
    here = len(trials.gpus())
    for number, (what, pair) in enumerate(PAIRS.items()):
        if here < pair.gpus and (here or not pair.on_cpus):
            findings.unchecked(what, f"GPUs that it needs: {pair.gpus}; there are {here}")
        elif settings.left() < _SECS_EACH:
            findings.unchecked(what, "no time was left")
        else:
            with findings.attempt(what):
                one = _train(settings, f"one-{number}", pair.one, pair.first_steps, pair.workers)
                trials.compare(findings, what, one, _train(settings, f"other-{number}", pair.other), pair.tolerance)
    with findings.attempt("float16"):
        words = dict(num_gpus=1, dtype="float16", max_steps=50 if here else 3, batch_size=8)
        done = trials.command(
            "tower_train", *trials.training_words(settings, "float16", **words), seconds=settings.left()
        )
        findings.check("Stopped by last step" in done.stdout, "a run in float16 with its loss scale ends well")


def _train(settings, name, options, first_steps=0, workers=1) -> dict:
    """{variable: value} after the last step of a run."""
    for steps in filter(None, (first_steps, _STEPS)):
        words = trials.training_words(settings, name, **(_EXACT | options), max_steps=steps, check_towers="never")
        if workers == 1:
            trials.command("tower_train", *words, seconds=settings.left())
        else:
            script = pathlib.Path(__file__).parents[2] / "scripts" / "local_cluster.py"
            start = [sys.executable, script, f"--workers={workers}", *words]
            subprocess.run(start, check=True, timeout=max(5.0, settings.left()))
    reader = tf.train.load_checkpoint(f"{settings.scratch}/{name}/model.ckpt-{_STEPS}")
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
