"""The exchange of workers' statuses and states on the chief's server."""

import time

import clusters
import jobs
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.cluster.heartbeat import Heartbeat
from tower_train.cluster.store import Store, WorkerStatus
from tower_train.cluster.task import Policy, Task

HOSTS, STARTS = ("a:1", "b:2", "c:3"), ["chief", "a", "b"]


@pytest.fixture(scope="module")
def target():
    return tf.distribute.Server({"worker": clusters.hosts(1)}, "worker", 0).target


def missing(_):
    raise errors.WorkerError("worker 2 is missing")


def exchange(target, worker, starts=STARTS, pause=missing):
    return Store(target, Task(HOSTS, worker), 60.0, starts.__getitem__, pause)


def test_states_come_to_the_others_and_those_of_this_step_and_start_back_byte_by_byte(target):
    states = [b"", b"\x00first\x00", bytes(range(256)) * 1000]
    chief, *others = (exchange(target, worker) for worker in range(3))
    chief.hand_out(states)
    assert [other.fetch() for other in others] == states[1:]
    for other, state in zip(others, states[:0:-1], strict=True):
        other.send(7, state)
    assert chief.collect(7) == chief.collect(7) == states[:0:-1]  # again after a save that failed
    for starts, step in ((STARTS, 8), (["chief", "a", "c"], 7)):
        with pytest.raises(errors.WorkerError, match="worker 2 is missing"):
            exchange(target, 0, starts).collect(step)
    others[0].send(8, b"eight")
    chief = exchange(target, 0, pause=lambda _: others[1].send(8, b"late"))
    assert chief.collect(8) == [b"eight", b"late"]


def test_what_others_write_in_a_row_is_ignored_and_named_once(target, capsys):
    stores, mine = [exchange(target, worker) for worker in range(3)], WorkerStatus("mine")
    stores[0].clear()
    stores[1].exchange(mine)
    stores[0].exchange(WorkerStatus("chief"))  # which may read its own row before that is written
    for text in (None, "no status", "{}"):
        if text:
            clusters.write_to_store(target.removeprefix("grpc://"), text, [1])
        assert list(stores[0].exchange(WorkerStatus("chief"))) == [WorkerStatus("chief"), mine, WorkerStatus()]
    assert list(stores[2].exchange(None)) == [WorkerStatus("chief"), WorkerStatus()]
    expected = "*** Ignored a status of worker 1 (b:2) that it did not write: b'no status'\n"
    assert capsys.readouterr().out == expected


def test_a_row_of_a_dead_process_is_free_once_a_new_chief_empties_it(target):
    chief = exchange(target, 0)
    chief.clear()
    clusters.write_to_store(target.removeprefix("grpc://"), WorkerStatus("dead").to_json(), [1])
    beat = Heartbeat(Task(HOSTS, 1), Policy(60.0, 60.0), target, print)
    beat.start()
    time.sleep(0.5)  # in which it looks, and takes the other for alive
    chief.clear()
    jobs.wait_for(lambda: chief.exchange(WorkerStatus("chief"))[1].start_id == beat.status.start_id)
    beat.end()
    assert not beat.is_displaced
