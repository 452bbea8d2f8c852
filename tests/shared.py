"""What several processes of one test run need, made by the first of them."""

import fcntl
import os


def once(tmp_path_factory, name, make):
    """A folder of this test run that make(folder) has filled, in whichever of pytest-xdist's processes came first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder
