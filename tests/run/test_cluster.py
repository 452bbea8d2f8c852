"""Several workers on loopback, real processes: they train what one process trains, and say who is missing."""

import contextlib
import signal
import socket
import time

import numpy as np
import pytest
import runs

TIMEOUT_SECS = 6
COMMON = dict(
    workload="norm_workload", dtype="float64", optimizer="momentum", learning_rate=0.05, moving_average_decay=0.9,
    clip_gradients=0.5, lookahead_every_steps=5, log_every_steps=1, summary_every_steps=0, keep_checkpoints=0,
    worker_timeout_secs=TIMEOUT_SECS,
)  # fmt: skip


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """Workers in processes of their own; `changes` are options of single workers, by index."""

    def __init__(self, train_dir, count, changes=None, absent=(), **options):
        self.hosts = [f"localhost:{port}" for port in free_ports(count)]
        self._options = COMMON | dict(worker_hosts=",".join(self.hosts), train_dir=train_dir) | options
        self._changes, self._stack = changes or {}, contextlib.ExitStack()
        self.workers = {index: self.start(index) for index in range(count) if index not in absent}

    def start(self, index):
        words = runs.flags(**(self._options | {"task_index": index} | self._changes.get(index, {})))
        return self._stack.enter_context(runs.Trainer(*words))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def end(self, *indices):
        """Waits for workers' ends; returns their exit statuses."""
        return [self.workers[index].process.wait(runs.WAIT_SECS) for index in indices]

    def wait_for_step(self, train_dir, step):
        self.workers[0].wait_until(lambda: runs.logged_step(train_dir) >= step)


def losses(directory):
    return [record["loss"] for record in runs.metrics(directory)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with one tower: 50 steps of 12 examples."""
    directory = tmp_path_factory.mktemp("alone")
    own = {name: value for name, value in COMMON.items() if name != "worker_timeout_secs"}
    runs.train_toy(directory, **(own | dict(num_gpus=1, batch_size=12, max_steps=50)))
    return directory


def test_a_run_moves_between_machines_and_ends_as_if_it_had_not(alone, tmp_path):
    """20 steps on the CPU of one, 20 mirrored on two with two towers each, 10 on one with four; all normalise over the
    global batch. Two sessions write the checkpoints of the second part: the chief's and nobody else's."""
    own = {name: value for name, value in COMMON.items() if name != "worker_timeout_secs"}
    runs.train_toy(tmp_path, **(own | dict(num_gpus=1, batch_size=12, max_steps=20)))
    towers = dict(sync_batch_norm=True, batch_size=3)
    with Cluster(
        tmp_path, 2, {1: dict(train_dir=tmp_path / "of the follower")}, num_gpus=2, max_steps=40,
        variable_update="mirrored", check_mirrors_every_steps=1, eval_every_steps=30, **towers,
    ) as cluster:  # fmt: skip
        assert cluster.end(0, 1) == [0, 0], [worker.output() for worker in cluster.workers.values()]
        assert "12 examples a step (2 x 3 on each of 2 workers)" in cluster.workers[0].output()
        assert "worker 1 (localhost:" in cluster.workers[1].output()
    assert not (tmp_path / "of the follower").exists()
    runs.train_toy(tmp_path, **(own | towers | dict(num_gpus=4, max_steps=50, variable_update="mirrored")))
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-9)
    assert len(losses(alone)) == 50
    found, expected = runs.variables(tmp_path, 50), runs.variables(alone, 50)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


FAULTY = dict(max_steps=runs.ENDLESS, num_gpus=1, batch_size=4, save_every_steps=5)


def test_workers_that_lose_one_say_which_and_leave(tmp_path):
    """Of three, so that one learns it from the chief; the lost one hangs."""
    with Cluster(tmp_path, 3, **FAULTY) as cluster:
        cluster.wait_for_step(tmp_path, 8)
        lost, began = cluster.workers[2], time.monotonic()
        lost.process.send_signal(signal.SIGSTOP)
        assert cluster.end(0, 1) == [138, 138], [worker.output() for worker in cluster.workers.values()]
        assert time.monotonic() - began < 2 * TIMEOUT_SECS + 10
        for worker in (cluster.workers[0], cluster.workers[1]):
            last_line = worker.output().splitlines()[-1]
            assert f"error: worker 2 ({cluster.hosts[2]}) is missing: no sign of life" in last_line
            assert "last seen at step" in last_line
    assert runs.saved_steps(tmp_path)[0] == 5
    assert all(step % 5 == 0 for step in runs.saved_steps(tmp_path))


def test_a_run_whose_workers_are_killed_waits_and_goes_on_with_every_example_once(alone, tmp_path):
    """First the second worker dies, then the chief; each is started again by the same command."""
    options = dict(max_steps=50, num_gpus=1, batch_size=6, save_every_steps=5, sync_batch_norm=True)
    with Cluster(tmp_path, 2, workload="norm_workload:SLOW", wait_for_workers=True, **options) as cluster:
        for lost, other, step in ((1, 0, 8), (0, 1, 24)):
            cluster.wait_for_step(tmp_path, step)
            cluster.workers[lost].process.kill()
            cluster.end(lost)
            missed = f"worker {lost} ({'the chief, ' if lost == 0 else ''}{cluster.hosts[lost]}) is missing"
            cluster.workers[other].wait_until(lambda: missed in cluster.workers[other].output())  # noqa: B023
            cluster.workers[lost] = cluster.start(lost)
        assert cluster.end(0, 1) == [0, 0], [worker.output() for worker in cluster.workers.values()]
    assert [record["examples"] for record in runs.metrics(tmp_path)] == list(range(12, 601, 12))
    np.testing.assert_allclose(losses(tmp_path), losses(alone), rtol=1e-9)


def test_a_worker_with_another_seed_is_refused_by_name(tmp_path):
    with Cluster(tmp_path, 2, {1: dict(seed=5)}, **FAULTY) as cluster:
        assert cluster.end(0, 1) == [2, 2]
        for worker in cluster.workers.values():
            assert f"error: worker 1 ({cluster.hosts[1]}) cannot train along: --seed is 5, the chief's 0. " in (
                worker.output()
            )
    assert not runs.saved_steps(tmp_path) and not (tmp_path / "run.json").exists()


def test_a_worker_that_never_starts_and_a_port_in_use_are_named(tmp_path):
    with (
        Cluster(tmp_path, 2, absent=[0, 1], **(FAULTY | dict(worker_timeout_secs=2))) as cluster,
        socket.socket() as taken,
    ):
        taken.bind(("localhost", int(cluster.hosts[1].rpartition(":")[2])))
        taken.listen()
        cluster.workers = {index: cluster.start(index) for index in (0, 1)}
        assert cluster.end(0, 1) == [138, 2]
        assert f"error: worker 1 ({cluster.hosts[1]}) has not started for" in cluster.workers[0].output()
        assert f"error: worker 1 ({cluster.hosts[1]}) cannot be started: its port is in use" in (
            cluster.workers[1].output()
        )


def test_a_signal_to_one_worker_ends_all_after_the_same_step(tmp_path):
    options = FAULTY | dict(save_every_steps=0)
    with Cluster(tmp_path, 2, **options) as cluster:
        cluster.wait_for_step(tmp_path, 8)
        cluster.workers[1].process.send_signal(signal.SIGTERM)
        assert cluster.end(0, 1) == [143, 143], [worker.output() for worker in cluster.workers.values()]
    assert runs.read_json(tmp_path, "result.json")["stopped_by"] == "another worker"
    assert runs.saved_steps(tmp_path) == [runs.logged_step(tmp_path)]
