"""The exchange of workers' statuses on the chief's server."""

import time

import clusters
import jobs
import pytest
import tensorflow as tf

from tower_train.cluster.heartbeat import Heartbeat
from tower_train.cluster.store import Store, WorkerStatus
from tower_train.cluster.task import Policy, Task

HOSTS = ("a:1", "b:2", "c:3")


@pytest.fixture(scope="module")
def target():
    return tf.distribute.Server({"worker": clusters.hosts(1)}, "worker", 0).target


def exchange(target, worker):
    return Store(target, Task(HOSTS, worker), 60.0)


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
