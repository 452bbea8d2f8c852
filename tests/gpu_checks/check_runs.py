"""Whole runs, as processes: those that must end with the same variables, and what they take of the GPUs' memory."""

import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jobs
import pytest
import tensorflow as tf

from gpu_checks import trials

STEPS = 6
EXACT = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, batch_size=8, num_gpus=1)
UNTOUCHED_MEGABYTES = 32  # of noise
MOST = 0.5  # of a card: memory that grows with the need of a small network
CLUSTER = jobs.ROOT / "scripts" / "local_cluster.py"


class Pair(NamedTuple):
    """Two runs that must be equal.

    Attributes:
      one, other: the options of each, beside EXACT.
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
_SYNCED = dict(model="resnet20", num_gpus=2, batch_size=4)
_NCCL = _MIRRORED | dict(all_reduce="nccl")
PAIRS = {
    "a network on a GPU is that on the CPU": Pair(dict(device="gpu"), dict(device="cpu"), 1, on_cpus=False),
    "variables on a whole card are those on the host": Pair(_MIRRORED, dict(variable_update="cpu"), 1, on_cpus=False),
    "a resumed run with staged examples is a whole one": Pair({}, {}, 1, first_steps=STEPS // 2),
    "copies that are compared after each step": Pair(
        _MIRRORED | dict(num_gpus=2, check_mirrors_every_steps=1, batch_size=4), {}, 2
    ),
    "batch normalisation over two GPUs": Pair(_SYNCED, dict(model="resnet20"), 2),
    "two runs with --deterministic, to the bit": Pair(_REPEATED, _REPEATED, 1, tolerance=0.0),
    "two workers": Pair(dict(batch_size=4), {}, 1, workers=2),
    "two workers with NCCL between them": Pair(_NCCL | dict(batch_size=4), {}, 2, on_cpus=False, workers=2),
    "two workers of two GPUs each with NCCL between them": Pair(
        _NCCL | dict(num_gpus=2, batch_size=2), {}, 4, on_cpus=False, workers=2
    ),
}


@pytest.mark.parametrize("what", PAIRS)
def test_these_end_alike(what, tmp_path):
    pair = PAIRS[what]
    trials.need(0 if pair.on_cpus and not trials.gpus() else pair.gpus)
    one = train(tmp_path / "one", pair.one, pair.first_steps, pair.workers)
    trials.assert_same(one, train(tmp_path / "other", pair.other), pair.tolerance)


def train(folder, options, first_steps=0, workers=1) -> dict:
    """{variable: value} after the last step of a run."""
    for steps in filter(None, (first_steps, STEPS)):
        words = trials.training_words(folder, **(EXACT | options), max_steps=steps, check_towers="never")
        if workers == 1:
            trials.command("tower_train", *words)
        else:
            subprocess.run([sys.executable, CLUSTER, f"--workers={workers}", *words], check=True)
    reader = tf.train.load_checkpoint(str(folder / f"model.ckpt-{STEPS}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_float16_with_its_loss_scale_ends_well(tmp_path):
    words = dict(num_gpus=1, dtype="float16", max_steps=50 if trials.gpus() else 3, batch_size=8)
    assert "Done at step" in trials.command("tower_train", *trials.training_words(tmp_path / "run", **words))


@pytest.mark.parametrize(("option", "value", "used"), [("num_gpus", "1", {0}), ("gpus", "1,0", {0, 1})])
def test_a_training_leaves_memory_for_an_evaluation_and_other_gpus_alone(option, value, used, tmp_path):
    trials.need(2 if option == "gpus" else 0)
    before = trials.megabytes("memory.used")
    words = dict(max_steps=10**9, batch_size=128, save_every_steps=100) | {option: value}
    trainer = subprocess.Popen([sys.executable, "-m", "tower_train", *trials.training_words(tmp_path / "run", **words)])
    try:
        while not (tmp_path / "run" / "checkpoint").exists():
            assert trainer.poll() is None
            time.sleep(0.1)
        after, total = trials.megabytes("memory.used"), trials.megabytes("memory.total")
        output = trials.command("tower_train.evaluate", f"--train_dir={tmp_path / 'run'}")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait() == 128 + signal.SIGTERM
    finally:
        trainer.kill()
        trainer.wait()
    assert "precision @ 1" in output
    if not (before and after and total):
        pytest.skip("nvidia-smi does not tell the GPUs' memory")
    grown = [now - then for then, now in zip(before, after, strict=True)]
    print(f"measured: megabytes taken of each GPU: {grown}")
    assert all(0 < grown[i] < MOST * total[i] for i in used)
    assert all(grown[i] <= UNTOUCHED_MEGABYTES for i in range(len(grown)) if i not in used)
