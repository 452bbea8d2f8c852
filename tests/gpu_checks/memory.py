"""The GPUs' memory: cards that were not asked for stay untouched, and an evaluation fits beside a training."""

import pathlib
import signal
import subprocess
import sys
import time

from gpu_checks import trials
from gpu_checks.machine import megabytes

_ENDLESS = 10**9  # steps
_UNTOUCHED_MEGABYTES = 32  # of noise
_START_SECS = 90
_MOST = 0.5  # of a card: memory that grows with the need of a small network


def check(findings, settings):
    count = len(trials.gpus())
    if not count:
        findings.unchecked("memory of GPUs", "there is none; a training with an evaluation beside it on the CPU")
    elif not megabytes("memory.used"):
        findings.unchecked("memory of GPUs", "nvidia-smi says nothing")
    with findings.attempt("one tower, and an evaluation beside it"):
        _train_beside(findings, settings, {"num_gpus": 1}, used={0}, evaluates=True)
    if count > 1:
        with findings.attempt("--gpus=1,0"):
            _train_beside(findings, settings, {"gpus": "1,0"}, used={0, 1}, evaluates=False)
    else:
        findings.unchecked("--gpus=1,0", "it needs two GPUs")


def _train_beside(findings, settings, towers, used, evaluates):
    """Trains until all has been looked at."""
    [(option, value)] = towers.items()
    name, folder, before = f"training with --{option}={value}", f"memory-{option}", megabytes("memory.used")
    words = trials.training_words(settings, folder, max_steps=_ENDLESS, batch_size=128, save_every_steps=100, **towers)
    trainer = subprocess.Popen([sys.executable, "-m", "tower_train", *words])
    try:
        deadline = time.monotonic() + min(_START_SECS, settings.left())
        while not pathlib.Path(settings.scratch, folder, "checkpoint").exists():
            if trainer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training has saved nothing (status {trainer.returncode})")
            time.sleep(0.1)
        _compare(findings, name, before, megabytes("memory.used"), used)
        if evaluates:
            run = f"--train_dir={settings.scratch}/{folder}"
            done = trials.command("tower_train.evaluate", run, seconds=settings.left())
            findings.check("precision @ 1" in done.stdout, "an evaluation on the same device while it trains",
                           megabytes=megabytes("memory.used") or "not known")  # fmt: skip
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(max(5.0, settings.left()))
        findings.check(status == 128 + signal.SIGTERM, f"{name} ends when it is told to", status=status)
    finally:
        trainer.kill()
        trainer.wait()


def _compare(findings, name, before, after, used):
    if not before or not after or not (total := megabytes("memory.total")):
        return
    grown = [now - then for then, now in zip(before, after, strict=True)]
    others = [grown[i] for i in range(len(grown)) if i not in used]
    findings.check(all(0 < grown[i] < _MOST * total[i] for i in used), f"{name}: takes what it needs of its GPUs",
                   megabytes=[grown[i] for i in sorted(used)])  # fmt: skip
    if others:
        findings.check(max(others) <= _UNTOUCHED_MEGABYTES, f"{name}: leaves the other GPUs alone", megabytes=others)
    else:
        findings.unchecked(f"{name}: leaves other GPUs alone", "there are no others")
