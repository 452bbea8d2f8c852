"""Workloads whose towers log which positions of the stream they are trained on, as they take them."""

import dataclasses
import os
import struct
import sys
import time
import uuid

import norm_workload
import numpy as np
import tensorflow as tf
import toy_workload

LOG = "SOAK_LOG"  # the environment variable that names the log
CLOCK = "SOAK_CLOCK"  # and one that names a file with how many seconds the clock of this process is ahead
PAUSE_SECS = "SOAK_PAUSE_SECS"  # and how long a batch takes at least
START = uuid.uuid4().hex  # of this process, or of its program where that has started itself again


def write_line(line):
    """Appends a line to the log at once, so that a kill can only come before it or after it."""
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def add_position(features, draws):
    position = tf.cast(draws.positions, features.dtype)[:, tf.newaxis]  # exact below 2**24
    return tf.concat([features, position], axis=1)


def add_noise_and_position(features, draws):
    return add_position(toy_workload.add_noise(features, draws), draws)


def log_positions(positions):
    whole = positions.astype(np.int64)
    assert (np.diff(whole) == 1).all(), whole
    write_line(f"batch {whole[0]} {len(whole)} {START}")
    time.sleep(float(os.environ.get(PAUSE_SECS, 0)))
    return np.int32(0)


def logged(network):
    """A network of four features that logs the fifth, the position; the chief of a cluster also that it builds it."""
    is_chief = "--task_index=0" in sys.argv or not any(word.startswith("--task_index=") for word in sys.argv)

    def inference(features, training):
        if not training:
            return network(features, training)
        if is_chief:
            write_line(f"chief {START}")
        logged = tf.numpy_function(log_positions, [features[:, 4]], tf.int32)
        with tf.control_dependencies([logged]):
            return network(tf.identity(features[:, :4]), training)

    return inference


WORKLOAD = dataclasses.replace(
    toy_workload.WORKLOAD, name="soak", inference=logged(toy_workload.network), augment=add_noise_and_position
)
ELASTIC = dataclasses.replace(
    norm_workload.WORKLOAD, name="elastic", inference=logged(norm_workload.network), augment=add_position
)


def late(features, draws):
    """The features with noise, a while later."""
    pause = float(os.environ.get(PAUSE_SECS, 0))
    later = tf.numpy_function(lambda x: time.sleep(pause) or x, [features], features.dtype)
    return toy_workload.add_noise(tf.ensure_shape(later, features.shape), draws)


LATE = dataclasses.replace(toy_workload.WORKLOAD, name="late", augment=late)


def set_clock(path, seconds_ahead):
    """Steps the clock of those who look at this file."""
    with open(path, "r+b" if os.path.exists(path) else "wb") as file:
        file.write(struct.pack("d", seconds_ahead))


def _seconds_ahead():
    with open(os.environ[CLOCK], "rb") as file:
        return struct.unpack("d", file.read())[0]


def _step_clocks():
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + _seconds_ahead()
    time.time_ns = lambda: now_ns() + int(_seconds_ahead() * 10**9)


if CLOCK in os.environ:
    _step_clocks()
