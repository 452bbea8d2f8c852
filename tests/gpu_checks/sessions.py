"""The GPUs' numbers and memory are the same in the eager context and in every session of a process."""

import json
import pathlib
import subprocess
import sys


def check(findings, settings):
    """As tests/gpus/test_sessions.py does, on real GPUs if there are some."""
    if settings.quick:
        findings.unchecked("one configuration of GPUs in all sessions", "--quick; tests/gpus/test_sessions.py has it")
        return
    import tensorflow as tf

    from cifar10 import source
    from tower_train.workload import DataRequest

    count = len(tf.config.list_physical_devices("GPU"))
    if not count and not settings.plugin:
        findings.unchecked("one configuration of GPUs in all sessions", "there is no GPU, and no g++ to fake some")
        return
    if not count:
        findings.unchecked("sessions on real GPUs", "there are none; on fake ones instead")
    folder, _ = source.locate(DataRequest("train", "generated", settings.data_dir))
    data = pathlib.Path(settings.scratch, "data", "cifar-10-batches-bin")
    data.parent.mkdir()
    data.symlink_to(folder)
    gpus = "2,0" if not count else "1,0" if count > 1 else "0"
    words = ["" if count else settings.plugin, settings.scratch, str(data.parent), gpus]
    done = subprocess.run([sys.executable, "-m", "sessions_on_fake_gpus", *words], stdout=subprocess.PIPE, text=True,
                          timeout=settings.left())  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"sessions_on_fake_gpus left with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    for opener, sessions in found["sessions"].items():
        findings.check(set(sessions) <= {found["context"]}, f"{opener}: as the eager context has them",
                       sessions=len(sessions))  # fmt: skip
    findings.measured("the eager context", options=found["context"])
