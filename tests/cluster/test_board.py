"""The exchange of workers' states on the chief's server."""

import clusters
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.cluster.board import Board
from tower_train.cluster.task import Task

HOSTS, STARTS = ("a:1", "b:2", "c:3"), ["chief", "a", "b"]


@pytest.fixture(scope="module")
def target():
    return tf.distribute.Server({"worker": clusters.hosts(1)}, "worker", 0).target


def missing(_):
    raise errors.WorkerError("worker 2 is missing")


def exchange(target, worker, starts=STARTS, pause=missing):
    return Board(target, Task(HOSTS, worker), 60.0, starts.__getitem__, pause)


def test_states_come_to_the_others_and_back_byte_by_byte(target):
    states = [b"", b"\x00first\x00", bytes(range(256)) * 1000]
    chief, *others = (exchange(target, worker) for worker in range(3))
    chief.hand_out(states)
    assert [other.fetch() for other in others] == states[1:]
    for other, state in zip(others, states[:0:-1], strict=True):
        other.send(7, state)
    assert chief.collect(7) == chief.collect(7) == states[:0:-1]  # again after a save that failed


def test_the_chief_waits_for_the_states_of_this_step_and_of_this_start(target):
    others = [exchange(target, worker) for worker in (1, 2)]
    for other in others:
        other.send(7, b"seven")
    with pytest.raises(errors.WorkerError, match="worker 2 is missing"):
        exchange(target, 0).collect(8)
    with pytest.raises(errors.WorkerError, match="worker 2 is missing"):
        exchange(target, 0, ["chief", "a", "c"]).collect(7)

    def arrive(_):
        others[1].send(8, b"late")

    others[0].send(8, b"eight")
    assert exchange(target, 0, pause=arrive).collect(8) == [b"eight", b"late"]
