"""Folders that several processes of one test run need, made by the first of them."""

import fcntl
import os


def once(tmp_path_factory, name, make):
    """A folder of this test run that make(folder) has filled, in whichever of pytest-xdist's processes came first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    made = folder.with_name(f"{name}.made")
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir()  # fails where another process began, and failed
            make(folder)
            made.touch()
    return folder
