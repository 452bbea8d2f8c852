"""Several workers on loopback, real processes that die, hang or are not what they should be: who is missing is said."""

import concurrent.futures
import queue
import re
import signal
import socket
import time

import clusters
import jobs
import pytest
import soak_runs
import tensorflow as tf

from tower_train import errors
from tower_train.cluster import agreement, heartbeat
from tower_train.cluster.agreement import Agreement
from tower_train.cluster.store import WorkerState
from tower_train.cluster.task import Policy, Task
from tower_train.graph import devices
from tower_train.proof.comparison import Outcome
from tower_train.run import opening

TIMEOUT_SECS = 3
FAULTY = clusters.NORM | dict(
    max_steps=jobs.ENDLESS, batch_size=4, save_every_steps=5, worker_timeout_secs=TIMEOUT_SECS
)


def test_workers_that_lose_one_say_which_and_leave(tmp_path):
    """Of three, so that one learns it from the chief; the lost one hangs."""
    with clusters.programs(3, "tower_train", *jobs.flags(train_dir=tmp_path, **FAULTY)) as workers:
        workers[0].wait_until(lambda: jobs.logged_step(tmp_path) >= 8)
        began = time.monotonic()
        workers[2].process.send_signal(signal.SIGSTOP)
        for worker in workers[:2]:
            assert worker.process.wait(jobs.WAIT_SECS) == 138, worker.output()
            last_line = worker.output().splitlines()[-1]
            assert re.search(r"error: worker 2 \(\S+\) is missing: no sign of life.*last seen at step", last_line)
        assert time.monotonic() - began < 2 * TIMEOUT_SECS + 20
    assert jobs.saved_steps(tmp_path)[0] == 5
    assert all(step % 5 == 0 for step in jobs.saved_steps(tmp_path))


def test_a_chief_whose_run_is_ended_by_a_worker_that_dies_of_it_has_saved_and_is_not_done(tmp_path):
    with clusters.programs(2, "tower_train", *jobs.flags(train_dir=tmp_path, **FAULTY)) as workers:
        workers[0].wait_until(lambda: jobs.logged_step(tmp_path) >= 8)
        workers[1].process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        workers[1].process.send_signal(signal.SIGKILL)
        assert workers[0].process.wait(jobs.WAIT_SECS) in (138, 128 + signal.SIGTERM), workers[0].output()
        assert workers[1].process.wait(jobs.WAIT_SECS) in (-9, 128 + signal.SIGTERM)
    result = jobs.read_json(tmp_path, "result.json") if (tmp_path / "result.json").exists() else {}
    assert result.get("stopped_by") != "last step" and all(
        step % 5 == 0 or step == result["step"] for step in jobs.saved_steps(tmp_path)
    )


def test_a_worker_whose_input_hangs_while_it_lives_is_named_and_all_leave(tmp_path):
    """The second one's of step 6; the first one has done its part of that, and waits."""
    options = FAULTY | dict(workload="norm_workload:STUCK", worker_timeout_secs=2, stall_timeout_secs=1)
    with clusters.programs(2, "tower_train", *jobs.flags(train_dir=tmp_path, **options)) as workers:
        for worker in workers:
            assert worker.process.wait(jobs.WAIT_SECS) == 138, worker.output()
            last_line = worker.output().splitlines()[-1]
            assert "error: Step 6 stands still, for" in last_line, last_line
            assert re.search(r"since that was seen: worker 1 \(\S+\) waits for the input: the examples", last_line)
    assert jobs.saved_steps(tmp_path) == [5]


def test_a_run_waits_for_killed_workers_is_not_touched_by_strays_and_trains_every_example_once(tmp_path):
    """First the second worker dies, then the chief; at first a wrong one comes in the second one's place. In the end
    SIGTERM to the second worker ends both after the same step, saved."""
    with soak_runs.scripted(tmp_path, 2, 2, wait_for_workers=True) as run:
        run.await_step()
        stray = run.come(1, worker_hosts=f"{run.hosts[0]},{clusters.hosts(1)[0]}", learning_rate=0.5)
        for what in ("garbage in the store", "wrong returner"):
            run.disturb(what)
            run.await_step()
        refused = "cannot train with the chief: --learning_rate is 0.5, the chief's 0.05; the list of workers is"
        displaced = "trains already, in another process"
        assert (
            refused in stray.output() or displaced in stray.output()
        )  # the second if worker 1 is back before it compares
        run.end_one(0, signal.SIGKILL)
        run.end(1)
    assert run.sizes[-1] == 2
    assert jobs.saved_step(run.train_dir) == jobs.logged_step(run.train_dir)
    assert jobs.read_json(run.train_dir, "result.json")["stopped_by"] == "another worker"


def test_a_function_of_one_worker_ends_all_after_the_same_step(tmp_path, monkeypatch):
    """Each has its place among the workers of its machine."""
    place, places = devices.place, set()
    monkeypatch.setattr(devices, "place", lambda *a, **local: places.add(local.get("local")) or place(*a, **local))
    options = clusters.NORM | dict(max_steps=jobs.ENDLESS)
    results = clusters.train_together(tmp_path, 2, after_step={1: lambda step, _: step == 5}, **options)
    assert [(result.step, result.stopped_by) for result in results] == [(6, "the program")] * 2
    assert jobs.saved_steps(tmp_path) == [6] and places >= {(0, 2), (1, 2)}


def test_all_end_well_where_the_chief_finds_no_gain_and_have_no_more_to_do_after_that(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(opening, "compare_towers", lambda *_: compared.append(1) or Outcome("compared"))
    options = clusters.NORM | dict(batch_size=6, max_steps=jobs.ENDLESS, learning_rate=1e-30, eval_every_steps=5)
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
        assert chief._heartbeat.next_start().lost == (1,)
    assert late.value is error and f"worker 1 ({hosts[1]}) is missing" in str(error)


@pytest.mark.parametrize(("waits", "reason"), [(True, "last step"), (False, None)])
def test_a_worker_that_starts_again_at_the_end_learns_it_from_the_chief_which_waits_for_it(
    waits, reason, monkeypatch, capsys
):
    """Its first start dies before the end, as of a chief that was stopped meanwhile. Without a reason the chief knows
    only that a worker asked all to stop, which died before it said why: that is told to start with all."""
    monkeypatch.setattr(agreement, "_trained_with", set())
    hosts = clusters.hosts(2)
    chief, other, again = (clusters.member(hosts, index, 2.0, 60.0, waits) for index in (0, 1, 1))
    with concurrent.futures.ThreadPoolExecutor() as pool, chief:
        other.__enter__()
        agreed = [pool.submit(member.agree, dict, 3, 9) for member in (chief, other)]
        assert [each.result(jobs.WAIT_SECS) for each in agreed] == [(3, 9)] * 2
        chief._heartbeat.note(state=WorkerState.DONE)
        other._heartbeat.end()
        left = pool.submit(chief.leave, reason)
        jobs.wait_for(lambda: chief._heartbeat.status.state is WorkerState.OVER)
        agreement._trained_with.clear()  # as in another process
        with pytest.raises((agreement.RunOver, errors.WorkerError)) as over, again:
            again.agree(dict, 0, 9)
        assert left.result(jobs.WAIT_SECS) == getattr(over.value, "stopped_by", None) == reason
    assert reason or "have ended at step 3, without worker 1 (" in str(over.value)
    staying = f"*** Staying for at most 60 s, to tell worker 1 ({hosts[1]}) that the run has ended."
    assert not reason or staying in capsys.readouterr().out


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

        def compared(*facts):
            return [pool.submit(each.agreement.compare, its) for each, its in zip(members, facts, strict=True)]

        for agreed in [pool.submit(each.agree, dict, 0, 0) for each in members]:
            agreed.result(jobs.WAIT_SECS)
        task, policy = Task(tuple(hosts), 1), Policy(5.0, 60.0)
        second = heartbeat.Heartbeat(task, policy, f"grpc://{hosts[0]}", left.put)
        second.start()  # as on another machine, with the same command
        with pytest.raises(errors.ConfigError, match=r"worker 1 .* trains already, in another process\. Stop that"):
            Agreement(task, second).reach(dict, 0, 0)
        began = time.monotonic()
        second.leave_for(errors.ConfigError("refused"))
        assert time.monotonic() - began < 4, "it waits for a row of its own"
        second.end()
        for facts in ({"w": "float64[4]"}, {"w": "float64[4]", "v": "none"}):
            for same in compared(facts, facts):
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
    hosts = clusters.hosts(2)
    for seed in (0, 1):
        members = [clusters.member(hosts, index, 600.0, 600.0) for index in (0, 1)]

        def train(member, facts={"--seed": seed}):  # noqa: B006
            with member:
                return member.agree(lambda: facts, 3, 9), member.leave("last step")

        with concurrent.futures.ThreadPoolExecutor() as pool:
            other = pool.submit(train, members[1])
            time.sleep(0.5)  # in which it reads what the chief wrote last
            assert [train(members[0]), other.result(jobs.WAIT_SECS)] == [((3, 9), "last step")] * 2


def test_a_worker_whose_port_is_in_use_is_named():
    hosts = clusters.hosts(2)
    with socket.create_server(("localhost", int(hosts[1].rpartition(":")[2]))):
        with pytest.raises(errors.RunError, match=rf"worker 1 \({hosts[1]}\) cannot be started: its port is in use"):
            clusters.member(hosts, 1, 30.0, 60.0)


def test_a_worker_whose_address_leads_elsewhere_is_refused_or_says_so(capsys):
    hosts, away = clusters.hosts(2), clusters.hosts(2)
    member, elsewhere = (clusters.member(each, 1, 2.0, 60.0) for each in (hosts, away))
    member._heartbeat.note(start_id="another")
    member.target = elsewhere.target
    with pytest.raises(errors.ConfigError, match="is another process, which answers at that address. Stop that first"):
        member._check_address()
    member.task = Task((hosts[0], clusters.hosts(1)[0]), 1)
    with pytest.raises(errors.ConfigError, match="not even from here: Connection refused. Start it on that machine"):
        member._check_address()
    member.task = Task((hosts[0], "unknown.invalid:1"), 1)
    member._check_address()
    assert "*** worker 1 (unknown.invalid:1) is not reached at its address, not even" in capsys.readouterr().out


INCARNATION = "Device /cpu:0 current incarnation doesn't match with one in the group"


def test_a_connection_that_is_lost_without_a_missing_worker_is_a_reason_to_start_all_again():
    failed = tf.errors.FailedPreconditionError(None, None, f"Graph execution error:\n\n{INCARNATION}")
    for error, timeout_secs, expected in (
        (failed, 0.5, INCARNATION),
        (tf.errors.UnavailableError(None, None, "Connection reset by peer"), 0.5, "Connection reset by peer"),
        (RuntimeError("mine"), 600.0, None),  # of a user's hook
    ):
        hosts, began = clusters.hosts(2), time.monotonic()
        member = clusters.member(hosts, 0, timeout_secs, 600.0, waits=True)
        with pytest.raises((errors.WorkerError, RuntimeError)) as raised, member.failures_named():
            raise error
        assert (expected is None) == (raised.value is error) and time.monotonic() - began < 300
        assert not expected or f"connection to another worker was lost at step 0 ({expected}" in str(raised.value)
