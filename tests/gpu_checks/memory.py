"""The GPUs' memory: cards that were not asked for stay untouched, and an evaluation fits beside a training."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

from gpu_checks.machine import megabytes

_ENDLESS = 10**9  # steps
_UNTOUCHED_MEGABYTES = 32  # of noise
_START_SECS = 90
_MOST = 0.5  # of a card: memory that grows with the need of a small network


def check(findings, settings):
    if settings.quick:
        findings.unchecked("memory of a training, and of an evaluation beside it", "--quick")
        return
    from gpu_checks import trials

    count = len(trials.gpus())
    if not count:
        findings.unchecked("memory of GPUs", "there is none; a training with an evaluation beside it on the CPU")
    elif not megabytes("memory.used"):
        findings.unchecked("memory of GPUs", "nvidia-smi says nothing")
    with findings.attempt("one tower, and an evaluation beside it"):
        _train_beside(findings, settings, trials, {"num_gpus": 1}, used={0}, evaluates=True)
    if count > 1:
        with findings.attempt("--gpus=1,0"):
            _train_beside(findings, settings, trials, {"gpus": "1,0"}, used={0, 1}, evaluates=False)
    else:
        findings.unchecked("--gpus=1,0", "it needs two GPUs")


def _train_beside(findings, settings, trials, towers, used, evaluates):
    """Trains until all has been looked at."""
    asked = ", ".join(f"--{name}={value}" for name, value in towers.items())
    name, before = f"training with {asked}", megabytes("memory.used")
    folder = f"memory-{'-'.join(towers)}"
    words = trials.training_words(settings, folder, max_steps=_ENDLESS, batch_size=128, save_every_steps=100, **towers)
    with _running("tower_train", *words) as trainer:
        _wait_for(pathlib.Path(settings.scratch, folder, "checkpoint"), trainer, min(_START_SECS, settings.left()))
        _compare(findings, name, before, megabytes("memory.used"), used)
        if evaluates:
            run = f"--train_dir={settings.scratch}/{folder}"
            done = trials.command("tower_train.evaluate", run, seconds=settings.left())
            findings.check("precision @ 1" in done.stdout, "an evaluation on the same device while it trains",
                           megabytes=megabytes("memory.used") or "not known")  # fmt: skip
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(max(5.0, settings.left()))
        findings.check(status == 128 + signal.SIGTERM, f"{name} ends when it is told to", status=status)


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


@contextlib.contextmanager
def _running(module, *words):
    process = subprocess.Popen([sys.executable, "-m", module, *map(str, words)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(path, process, seconds):
    deadline = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the training left with status {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the training has saved nothing in {seconds:.0f} s")
        time.sleep(0.1)
