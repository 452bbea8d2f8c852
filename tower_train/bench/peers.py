"""The other processes of a side that trains in several: python -m tower_train.bench.peers SPEC, started by its worker.

They train along and talk with nobody but the side's worker, which is the first of them. They end when it does, however
it ends, as their standard input then does; and it ends when one of them does. All find their place in TF_CONFIG.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from tower_train.cluster import ports
from tower_train.options import command_line


@contextlib.contextmanager
def started(spec: dict) -> Iterator[list[int]]:
    """Within this block the other processes of a side run, if it has any; this one is the first.

    Args:
      spec: of the side; `num_processes` says how many there are.

    Yields:
      The numbers of the other processes.
    """
    count = spec.get("num_processes", 1)
    if count == 1:
        yield []
        return
    hosts = [f"localhost:{port}" for port in ports.free_ports(count)]
    os.environ["TF_CONFIG"] = _place(hosts, 0)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps(spec)], stdin=subprocess.PIPE, stdout=sys.stderr,
            env=os.environ | {"TF_CONFIG": _place(hosts, index)},
        )
        for index in range(1, count)
    ]  # fmt: skip
    leaving = threading.Event()
    for child in children:
        threading.Thread(target=_end_with, args=[child, leaving], daemon=True).start()
    try:
        yield [child.pid for child in children]
    finally:
        leaving.set()
        for child in children:
            child.kill()
            child.wait()


class Free:
    """Stands for the pacer in the other processes: these do the steps that the first one does."""

    work_per_step = None

    def after_step(self, loss: float | None = None) -> bool:
        del loss
        return False


def _place(hosts: list[str], index: int) -> str:
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})


def _end_with(child: subprocess.Popen, leaving: threading.Event) -> None:
    status = child.wait()
    if not leaving.is_set():
        os.write(2, f"another process of this side ended with status {status}\n".encode())
        os._exit(1)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main(argv: list[str]) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    command_line.import_tensorflow()
    from tower_train.bench import sides

    spec = json.loads(argv[1])
    scratch = os.path.join(spec["scratch"], f"of process {os.getpid()}")
    os.makedirs(scratch)
    sides.run(spec | {"scratch": scratch}, Free())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
