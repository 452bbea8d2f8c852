"""A file system that can be full, for tests: a small tmpfs of its own where this process may mount one."""

import contextlib
import pathlib
import subprocess


def can_mount(folder):
    """Returns whether this process may mount file systems."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), mounted(folder, 1):
        return True
    return False


@contextlib.contextmanager
def mounted(folder, megabytes):
    """Within this block the folder is a tmpfs of this size."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    subprocess.run(words, check=True, capture_output=True)
    try:
        yield folder
    finally:
        unmount(folder)


def make_read_only(folder):
    """Lets nothing be written by a path into the folder, until it is unmounted."""
    for words in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *words, str(folder)], check=True, capture_output=True)


def unmount(folder):
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(folder):
    """Fills a file system to its last byte; returns the file to remove again."""
    path = pathlib.Path(folder, "filler")
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path
