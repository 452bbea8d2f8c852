"""Starts a whole cluster on loopback: python scripts/local_cluster.py --workers=2 --num_gpus=2 [options of the trainer]

Each worker's lines begin with its name. Ctrl-C reaches all of them. The exit status is the chief's.
"""

import argparse
import signal
import subprocess
import sys
import threading

from tower_train import host

_LINGER_SECS = 60  # for the others to end when the chief has


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="processes; the first is the chief")
    options, flags = parser.parse_known_args(argv)
    if options.workers < 1:
        parser.error(f"--workers={options.workers}: it must be at least 1.")
    hosts = ",".join(host.free_addresses(options.workers))
    # In sessions of their own: the terminal's Ctrl-C would reach them twice, and the second leaves at once.
    workers = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "tower_train", *flags, f"--worker_hosts={hosts}", f"--task_index={index}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for index in range(options.workers)
    ]  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: [worker.send_signal(number) for worker in workers])
    readers = [threading.Thread(target=_pass_on, args=[i, worker.stdout]) for i, worker in enumerate(workers)]
    for reader in readers:
        reader.start()
    status = workers[0].wait()
    for worker in workers[1:]:
        try:
            worker.wait(_LINGER_SECS)
        except subprocess.TimeoutExpired:
            worker.kill()
    for reader in readers:
        reader.join()
    return status if status >= 0 else 128 - status


def _pass_on(index: int, lines) -> None:
    for line in lines:
        sys.stdout.write(f"[worker {index}] {line.decode(errors='replace')}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
