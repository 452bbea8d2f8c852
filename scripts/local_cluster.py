"""Starts a whole cluster on loopback: python scripts/local_cluster.py --workers=2 --num_gpus=2 [options of the trainer]

Or starts any program that finds its task in TF_CONFIG: python scripts/local_cluster.py --workers=2 -- python mine.py
--evaluator adds a process as TF_CONFIG's evaluator, for train_and_evaluate of Estimators.

Anyone who can reach this machine can use the workers' ports: see docs/scaling.md.
Each worker's lines begin with its name. Ctrl-C reaches all of them. The exit status is the chief's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading

from tower_train import host

_LINGER_SECS, _EVALUATION_SECS = 60, 600  # for the others, and an evaluator, to end after the chief


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="processes; the first is the chief")
    parser.add_argument("--evaluator", action="store_true", help="an evaluator beside the workers of a program")
    words, program = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    options, flags = parser.parse_known_args(words)
    if options.workers < 1:
        parser.error(f"--workers={options.workers}: it must be at least 1.")
    if program is not None and (flags or not program):
        parser.error(f"{' '.join([*flags, '--', *program])}: give --workers, then -- and a program with its arguments.")
    if options.evaluator and program is None:
        parser.error(
            "--evaluator is for programs, as in --evaluator -- python mine.py; the trainer has evaluate --watch."
        )
    hosts, last = host.free_addresses(options.workers), options.workers + options.evaluator
    workers = [_start(hosts, index, flags, program) for index in range(last)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: [worker.send_signal(number) for worker in workers])
    names = [f"worker {index}" for index in range(options.workers)] + ["evaluator"]
    readers = [
        threading.Thread(target=_pass_on, args=[name, worker.stdout])
        for name, worker in zip(names, workers, strict=False)
    ]
    for reader in readers:
        reader.start()
    status = workers[0].wait()
    if status and options.evaluator:  # it would wait for a last checkpoint that never comes
        workers[-1].terminate()
    for index, worker in enumerate(workers[1:], start=1):
        try:
            worker.wait(_LINGER_SECS if index < options.workers else _EVALUATION_SECS)
        except subprocess.TimeoutExpired:
            worker.kill()
    for reader in readers:
        reader.join()
    return status if status >= 0 else 128 - status


def _start(hosts: list[str], index: int, flags: list[str], program: list[str] | None) -> subprocess.Popen:
    """Starts one worker: the trainer with these flags, or the program; an evaluator comes after all workers."""
    environment = dict(os.environ)
    if program is None:
        place = [f"--worker_hosts={','.join(hosts)}", f"--task_index={index}"]
        words = [sys.executable, "-u", "-m", "tower_train", *flags, *place]
    else:
        kind, index = ("worker", index) if index < len(hosts) else ("evaluator", 0)
        task = {"cluster": {"worker": hosts}, "task": {"type": kind, "index": index}}
        environment |= {"TF_CONFIG": json.dumps(task), "PYTHONUNBUFFERED": "1"}
        words = [sys.executable, *program[1:]] if program[0] in ("python", "python3") else program
    # In sessions of their own: otherwise Ctrl-C would reach them twice, which ends them at once.
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def _pass_on(name: str, lines) -> None:
    for line in lines:
        sys.stdout.write(f"[{name}] {line.decode(errors='replace')}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
