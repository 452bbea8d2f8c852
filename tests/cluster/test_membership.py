"""Several workers on loopback, real processes that die, hang or are not what they should be: who is missing is said."""

import concurrent.futures
import queue
import signal
import socket
import time

import clusters
import forked
import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.cluster import heartbeat
from tower_train.cluster.agreement import Agreement
from tower_train.cluster.task import Policy, Task
from tower_train.graph import devices
from tower_train.run import prepare

TIMEOUT_SECS = 3
COMMON = dict(
    workload="norm_workload", dtype="float64", optimizer="momentum", learning_rate=0.05, ema=0.9,
    clip_gradients=0.5, log_every_steps=1, summary_every_steps=0, keep_checkpoints=0,
    num_gpus=1, check_data=False, check_towers="never",
)  # fmt: skip
FAULTY = COMMON | dict(max_steps=jobs.ENDLESS, batch_size=4, save_every_steps=5, worker_timeout_secs=TIMEOUT_SECS)


def test_workers_that_lose_one_say_which_and_leave(tmp_path):
    """Of three, so that one learns it from the chief; the lost one hangs."""
    with clusters.Cluster(tmp_path, 3, **FAULTY) as cluster:
        cluster.wait_for_step(tmp_path, 8)
        lost, began = cluster.workers[2], time.monotonic()
        lost.process.send_signal(signal.SIGSTOP)
        assert cluster.end(0, 1) == [138, 138], cluster.outputs()
        assert time.monotonic() - began < 2 * TIMEOUT_SECS + 20
        for worker in (cluster.workers[0], cluster.workers[1]):
            last_line = worker.output().splitlines()[-1]
            assert f"error: worker 2 ({cluster.hosts[2]}) is missing: no sign of life" in last_line
            assert "last seen at step" in last_line
    assert jobs.saved_steps(tmp_path)[0] == 5
    assert all(step % 5 == 0 for step in jobs.saved_steps(tmp_path))


def test_a_worker_whose_input_hangs_while_it_lives_is_named_and_all_leave(tmp_path):
    """The second one's of step 6; the first one has done its part of that, and waits."""
    options = FAULTY | dict(workload="norm_workload:STUCK", worker_timeout_secs=2, stall_timeout_secs=1)
    with clusters.Cluster(tmp_path, 2, **options) as cluster:
        assert cluster.end(0, 1) == [138, 138], cluster.outputs()
        for output in cluster.outputs():
            last_line = output.splitlines()[-1]
            assert "error: Step 6 stands still, for" in last_line, output
            assert f"since that was seen: worker 1 ({cluster.hosts[1]}) waits for the input: the examples" in last_line
    assert jobs.saved_steps(tmp_path) == [5]


def test_a_run_waits_for_killed_workers_is_not_touched_by_strays_and_trains_every_example_once(tmp_path, monkeypatch):
    """First the second worker dies, then the chief; each is started again by the same command, but at first by a wrong
    one. In the end SIGTERM to the second worker ends both after the same step, saved."""
    monkeypatch.setenv(forked.FORK_AGAIN, "1")
    alone, run = tmp_path / "alone", tmp_path / "run"
    options = FAULTY | dict(workload="norm_workload:SLOW", batch_size=6, sync_batch_norm=True, wait_for_workers=True,
                            worker_timeout_secs=2)  # fmt: skip

    def refused(cluster, **changes):
        with cluster.start(1, **changes) as wrong:
            assert wrong.process.wait(jobs.WAIT_SECS) == 2, wrong.output()
            [line] = [line for line in wrong.output().splitlines() if "error: " in line]
        return line.partition("error: ")[2]

    with clusters.Cluster(run, 2, **options) as cluster:
        cluster.wait_for_step(run, 4)
        stray = f"{cluster.hosts[0]},{clusters.hosts(1)[0]}"
        assert "cannot train with the chief: --learning_rate is 0.5, the chief's 0.05; the list of workers is" in (
            refused(cluster, worker_hosts=stray, learning_rate=0.5)
        )
        clusters.write_on_board(cluster.hosts[0], "no status")
        cluster.wait_for_step(run, jobs.logged_step(run) + 3)
        assert "another process" not in "".join(cluster.outputs())
        for lost, other in ((1, 0), (0, 1)):
            cluster.wait_for_step(run, jobs.logged_step(run) + 3)
            cluster.workers[lost].process.kill()
            cluster.end(lost)
            missed = f"worker {lost} ({'the chief, ' if lost == 0 else ''}{cluster.hosts[lost]}) is missing"
            cluster.workers[other].wait_until(lambda: missed in cluster.workers[other].output())  # noqa: B023
            if lost:
                why = refused(cluster, seed=5)
                cluster.workers[0].wait_until(lambda: f"*** {why}" in cluster.workers[0].output())  # noqa: B023
                assert "cannot train with the chief: --seed is 5, the chief's 0. " in why
            cluster.workers[lost] = cluster.start(lost)
        cluster.wait_for_step(run, jobs.logged_step(run) + 3)
        cluster.workers[1].process.send_signal(signal.SIGTERM)
        assert cluster.end(0, 1) == [143, 143], cluster.outputs()
    records = jobs.metrics(run)
    jobs.train_toy(alone, **(COMMON | dict(batch_size=12, max_steps=len(records))))
    assert [record["examples"] for record in records] == list(range(12, 12 * len(records) + 1, 12))
    np.testing.assert_allclose(
        [record["loss"] for record in records], [record["loss"] for record in jobs.metrics(alone)], rtol=1e-9
    )
    jobs.assert_close(jobs.variables(run), jobs.variables(alone))
    assert jobs.read_json(run, "result.json")["stopped_by"] == "another worker"
    assert jobs.saved_steps(run)[-1] == len(records)


def test_a_session_hook_of_one_worker_ends_all_after_the_same_step(tmp_path, monkeypatch):
    """Each has its place among the workers of its machine."""
    place, places = devices.place, set()
    monkeypatch.setattr(devices, "place", lambda *a, **local: places.add(local.get("local")) or place(*a, **local))
    options = COMMON | dict(batch_size=4, max_steps=jobs.ENDLESS)
    results = clusters.train_together(tmp_path, 2, session_hooks={1: [jobs.stop_at(5)]}, **options)
    assert [(result.step, result.stopped_by) for result in results] == [(6, "a session hook")] * 2
    assert jobs.saved_steps(tmp_path) == [6] and places >= {(0, 2), (1, 2)}


def test_all_end_well_where_the_chief_finds_no_gain_and_have_no_more_to_do_after_that(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(prepare, "compare_towers", lambda *_: compared.append(1) or "compared")
    options = COMMON | dict(batch_size=6, max_steps=jobs.ENDLESS, learning_rate=1e-30, eval_every_steps=5)
    options |= dict(early_stopping_patience_epochs=1.0, check_towers="auto")
    first, second = (clusters.train_together(tmp_path, 2, **options) for _ in range(2))
    assert [result.stopped_by for result in first + second] == ["no gain"] * 4
    assert len({result.step for result in first + second}) == 1
    assert [result.loss is None for result in first + second] == [False, False, True, True]
    assert len(compared) == 2  # at the first start, in each worker


def test_who_is_stuck_in_a_step_without_a_missing_worker_leaves_as_it_was_told(monkeypatch):
    """The second worker has agreed, and is heard of no more; nobody ends the chief's step."""
    monkeypatch.setattr(heartbeat, "_GRACE_SECS", 0.2)
    hosts, left = clusters.hosts(2), queue.Queue()
    chief, other = (clusters.member(hosts, index, 2.0, 60.0, waits=True, leave=left.put) for index in (0, 1))
    with concurrent.futures.ThreadPoolExecutor() as pool, chief:
        with other:
            agreed = [pool.submit(member.agree, dict, 3, 9) for member in (chief, other)]
            assert [each.result(jobs.WAIT_SECS) for each in agreed] == [(3, 9)] * 2
        error = left.get(timeout=jobs.WAIT_SECS)
        with pytest.raises(errors.WorkerError, match="is missing") as late:  # as of a graph that is built meanwhile
            chief.session_opened(None)
    assert late.value is error and f"worker 1 ({hosts[1]}) is missing" in str(error)


def test_a_worker_that_fails_before_the_chief_has_started_is_named():
    hosts = clusters.hosts(2)
    chief, other = (clusters.member(hosts, index, 4.0, 60.0) for index in (0, 1))

    def fail():
        with other:
            raise errors.DataError("no files here")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        failed = pool.submit(fail)
        time.sleep(1.6)
        with pytest.raises(errors.WorkerError, match=r"worker 1 .*: no files here"), chief:
            chief.agree(dict, 0, 0)
        with pytest.raises(errors.DataError):
            failed.result(jobs.WAIT_SECS)


def test_workers_that_mean_the_same_go_on_and_one_that_does_not_is_named_to_all(monkeypatch):
    monkeypatch.setattr(heartbeat, "_GRACE_SECS", 0.2)
    hosts, left = clusters.hosts(2), queue.Queue()
    members = [clusters.member(hosts, index, 5.0, 60.0, leave=left.put) for index in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor() as pool, members[0] as chief, members[1] as other:

        def compared(*about):
            return [pool.submit(each.agreement.compare, its) for each, its in zip(members, about, strict=True)]

        for agreed in [pool.submit(each.agree, dict, 0, 0) for each in members]:
            agreed.result(jobs.WAIT_SECS)
        task, policy = Task(tuple(hosts), 1), Policy(5.0, 60.0)
        second = heartbeat.Heartbeat(task, policy, f"grpc://{hosts[0]}", left.put)
        second.start()  # as on another machine, with the same command
        with pytest.raises(errors.ConfigError, match=r"worker 1 .* trains already, in another process\. Stop that"):
            Agreement(task, second).reach(dict, 0, 0)
        second.leave_for(errors.ConfigError("refused"))
        second.end()
        for about in ({"w": "float64[4]"}, {"w": "float64[4]", "v": "none"}):
            for same in compared(about, about):
                same.result(jobs.WAIT_SECS)
        many = {f"option {i}": i for i in range(6)}
        _, differing = compared({"w": "float64[4]", "b": "int32[]"} | many, {"w": "float64[5]"})
        with pytest.raises(errors.ConfigError) as found:
            differing.result(jobs.WAIT_SECS)
        assert str(found.value).startswith(
            f"worker 1 ({hosts[1]}) cannot train with the chief: b is None, the chief's int32[]; option 0 is None, "
        )
        assert "option 3 is None, the chief's 3; and 3 more. Start all" in str(found.value)
        assert other.failure_behind(KeyError()) is found.value
        error = left.get(timeout=jobs.WAIT_SECS)
        assert str(error) == str(found.value) and error.exit_status == 2
        assert str(chief.failure_behind(RuntimeError())) == str(found.value)


def test_two_trainings_of_one_process_may_differ():
    """On the same servers and the same board."""
    hosts = clusters.hosts(2)
    for seed in (0, 1):
        members = [clusters.member(hosts, index, 600.0, 600.0) for index in (0, 1)]

        def train(member, about={"--seed": seed}):  # noqa: B006
            with member:
                return member.agree(lambda: about, 3, 9), member.leave("last step")

        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = pool.submit(train, members[1])
            time.sleep(0.5)  # in which it reads what the chief wrote last
            assert [train(members[0]), other.result(jobs.WAIT_SECS)] == [((3, 9), "last step")] * 2


def test_a_worker_whose_port_is_in_use_is_named():
    hosts = clusters.hosts(2)
    with socket.create_server(("localhost", int(hosts[1].rpartition(":")[2]))):
        with pytest.raises(errors.RunError, match=rf"worker 1 \({hosts[1]}\) cannot be started: its port is in use"):
            clusters.member(hosts, 1, 30.0, 60.0)


INCARNATION = "Device /cpu:0 current incarnation doesn't match with one in the group"


@pytest.mark.parametrize(("error", "timeout_secs", "expected"), [
    (tf.errors.FailedPreconditionError(None, None, f"Graph execution error:\n\n{INCARNATION}"), 0.5, INCARNATION),
    (tf.errors.UnavailableError(None, None, "Connection reset by peer"), 0.5, "Connection reset by peer"),
    (RuntimeError("mine"), 600.0, None),  # of a user's hook
])  # fmt: skip
def test_a_connection_that_is_lost_without_a_missing_worker_is_a_reason_to_start_all_again(
    error, timeout_secs, expected
):
    member, began = clusters.member(clusters.hosts(2), 0, timeout_secs, 600.0, waits=True), time.monotonic()
    with pytest.raises((errors.WorkerError, RuntimeError)) as raised, member.failures_named():
        raise error
    assert f"connection to another worker was lost at step 0 ({expected}" in str(raised.value) or raised.value is error
    assert (expected is None) == (raised.value is error) and time.monotonic() - began < 300
