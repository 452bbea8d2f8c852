"""A workload whose towers log which positions of the stream they are trained on, in processes that can be disturbed."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
import threading
import time
import uuid

import norm_workload
import numpy as np
import tensorflow as tf

LOG = "SOAK_LOG"  # the environment variable that names the log
PAUSE_SECS = "SOAK_PAUSE_SECS"  # and how long a batch takes at least
CUT = "SOAK_CUT"  # and a file upon which this process's connections are cut, and which is removed then
START = uuid.uuid4().hex  # of this process, or of its program where that has started itself again


def write_line(line):
    """Appends a line to the log at once, so that a kill can only come before it or after it."""
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def add_position(features, draws):
    position = tf.cast(draws.positions, features.dtype)[:, tf.newaxis]  # exact below 2**24
    return tf.concat([features, position], axis=1)


def log_positions(positions):
    whole = positions.astype(np.int64)
    assert (np.diff(whole) == 1).all(), whole
    write_line(f"batch {whole[0]} {len(whole)} {START}")
    time.sleep(float(os.environ.get(PAUSE_SECS, 0)))
    return np.int32(0)


def inference(features, training):
    """The network, that logs the fifth feature, the position; the chief of a cluster also that it builds it. An
    evaluation logs that it is one."""
    if not training:
        logged = tf.numpy_function(lambda: write_line("evaluation") or np.int32(0), [], tf.int32)
        with tf.control_dependencies([logged]):
            return norm_workload.network(tf.identity(features), training)
    if not any(word.startswith("--task_index=") and word != "--task_index=0" for word in sys.argv):
        write_line(f"chief {START}")
    logged = tf.numpy_function(log_positions, [features[:, 4]], tf.int32)
    with tf.control_dependencies([logged]):
        return norm_workload.network(tf.identity(features[:, :4]), training)


def trained(log, global_batch, steps):
    """Reads from a log of all workers the steps that count: those of the last start of the chief that did a step.

    A start of another worker is of the start of the chief that last built its graph before the worker's first batch.

    Returns:
      {step, from 0: its positions, in order}; over starts of the chief that did a step, the number of workers.
    """
    chief, chief_of, lines = None, {}, []
    for words in map(str.split, log.read_text().splitlines()):
        if words[0] == "chief":
            chief = words[1]
        if words[0] != "batch":
            continue
        first, count, start = int(words[1]), int(words[2]), words[3]
        chief_of.setdefault(start, chief)
        lines.append((first // global_batch, first, count, start))
    last = {step: start for step, _, _, start in lines if chief_of[start] == start}
    positions = collections.defaultdict(list)
    for step, first, count, start in lines:
        if step < steps and chief_of[start] == last.get(step):
            positions[step] += range(first, first + count)
    sizes = collections.Counter(chief_of.values())
    return {step: sorted(found) for step, found in positions.items()}, [
        sizes[start] for start in chief_of if chief_of[start] == start
    ]


WORKLOAD = dataclasses.replace(norm_workload.WORKLOAD, name="soak", augment=add_position, inference=inference)


def _cut_when_told(path):
    while True:
        time.sleep(0.05)
        if path.exists():
            path.unlink()
            for each in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile, or listens only
                    if os.readlink(f"/proc/self/fd/{each}").startswith("socket:"):
                        with socket.socket(fileno=os.dup(int(each))) as connection:
                            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                                connection.shutdown(socket.SHUT_RDWR)


if CUT in os.environ:
    threading.Thread(target=_cut_when_told, args=[pathlib.Path(os.environ[CUT])], daemon=True).start()
