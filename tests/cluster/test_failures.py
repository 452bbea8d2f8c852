"""The decision who is missing, from the workers' statuses alone."""

import dataclasses

import pytest
import tensorflow as tf

from tower_train.cluster import failures
from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.store import WorkerState, WorkerStatus
from tower_train.cluster.task import Policy, Task

HOSTS = ("a:1", "b:2", "c:3")
STARTS = tuple(f"start of {worker}" for worker in range(3))
TIMEOUT_SECS, START_TIMEOUT_SECS = 30.0, 1800.0


@pytest.fixture(autouse=True)
def unreached(monkeypatch):
    """{host: why it is not reached}, for the detector."""
    reasons = {}
    monkeypatch.setattr(failures, "reason_unreached", lambda host, secs: reasons.get(host, ""))
    return reasons


class Watch:
    def __init__(self, index=0, waits=False, sizes=None):
        self.seconds, self.index = 1000.0, index
        policy = Policy(TIMEOUT_SECS, START_TIMEOUT_SECS, waits, sizes)
        self.detector = FailureDetector(Task(HOSTS, index), policy, clock=lambda: self.seconds)

    def read(self, *statuses, state=WorkerState.TRAINING):
        self.detector.note(statuses, self.own(state))

    def failure(self, state=WorkerState.TRAINING, after=0.0):
        """(text, exit status) of the failure after so many seconds more; None if there is none."""
        self.seconds += after
        failure = self.detector.find(self.own(state))
        return failure and (str(failure), failure.exit_status)

    def own(self, state):
        has_agreed = state not in (WorkerState.STARTING, WorkerState.READY)
        return status(self.index, state=state, step=7, members=STARTS if self.index == 0 and has_agreed else ())


def status(worker, heartbeat=1, **changes):
    fields = dict(start_id=STARTS[worker], chief=STARTS[0], heartbeat=heartbeat, step=6)
    return WorkerStatus(**(fields | changes))


def test_workers_that_have_not_started_have_the_time_of_a_start(unreached, capsys):
    """And who is reached by then, but has no heartbeat yet, that of a heartbeat more."""
    watch, starting = Watch(), WorkerState.STARTING
    watch.read(status(0), status(1), WorkerStatus(), state=starting)
    for heartbeat in range(2, 62):
        watch.read(status(0), status(1, heartbeat), WorkerStatus(), state=starting)
        assert watch.failure(starting, after=29.9) is None
    waiting = capsys.readouterr().out.splitlines()
    assert 20 < len(waiting) < 60 and set(waiting) == {"*** Waiting for worker 2 (c:3) ..."}
    watch.read(status(0), status(1, 62), WorkerStatus(), state=starting)
    assert watch.failure(starting, after=10) is None
    unreached["c:3"] = "Connection refused"
    assert watch.failure(starting)[0].startswith("worker 2 (c:3) has not started, or is not reached from here (Connec")
    unreached.clear()
    watch.read(status(0), status(1, 63), WorkerStatus(), state=starting)
    text, exit_status = watch.failure(starting, after=27)
    assert exit_status == 138
    assert text.startswith("worker 2 (c:3) has not started for 1831 s. ")


def test_who_is_not_reached_is_named_with_the_reason_and_does_not_train(unreached, capsys):
    unreached |= {"c:3": "No route to host", "a:1": "Connection timed out"}
    watch, ready = Watch(), dict(state=WorkerState.READY)
    watch.read(status(0), status(1, **ready), status(2, **ready), state=WorkerState.STARTING)
    for _ in range(2):
        assert watch.detector.ready(watch.own(WorkerState.STARTING)) == [1]
    assert watch.failure(WorkerState.STARTING) is None
    late = Watch()
    late.seconds += START_TIMEOUT_SECS + 1
    late.read(status(0), status(1, **ready), status(2, **ready), state=WorkerState.STARTING)
    assert late.detector.ready(late.own(WorkerState.STARTING)) == [1]
    text = "worker 2 (c:3) has come, but is not reached from the chief: No route to host. "
    assert late.failure(WorkerState.STARTING)[0].startswith(text)
    unreached.clear()
    watch.seconds += 29
    assert watch.detector.ready(watch.own(WorkerState.STARTING)) == [1]
    watch.seconds += 0.9
    watch.read(status(0), status(1, 2, **ready), status(2, 2, **ready), state=WorkerState.STARTING)
    watch.seconds += 0.2
    assert watch.detector.ready(watch.own(WorkerState.STARTING)) == [1, 2]
    assert capsys.readouterr().out == 2 * f"*** {text}Waiting.\n"
    unreached["a:1"] = "Connection timed out"
    follower = Watch(index=1)
    assert follower.failure(WorkerState.STARTING, after=31) is None
    assert "(the chief, a:1), which is not reached: Connection timed out ..." in capsys.readouterr().out
    text, _ = follower.failure(WorkerState.STARTING, after=START_TIMEOUT_SECS)
    assert "has not started, or is not reached from here (Connection timed out), for 1831 s. " in text


def test_with_wait_for_workers_nobody_is_missed_before_all_have_agreed(capsys):
    """Neither who never came, nor who came and went, nor who leaves to start again; of those with a mistake the chief
    ends all, and others are named."""
    for index, others in ((0, (1, 2)), (1, (0,))):
        for row in (WorkerStatus(), *(status(others[0], state=state) for state in WorkerState)):
            watch = Watch(index, waits=True)
            watch.read(*[status(0), row][-len(others) :], state=WorkerState.READY)
            assert watch.failure(WorkerState.READY, after=10 * START_TIMEOUT_SECS) is None
            if row.start_id and row.state is not WorkerState.OVER:
                assert watch.failure(WorkerState.TRAINING) is not None
            if row.state is WorkerState.TRAINING:
                assert "itself again; a program that calls train() must be started" in watch.failure()[0]
        mistaken = status(others[0], state=WorkerState.FAILED, failure="seed", exit_status=2)
        watch.read(*[status(0), mistaken][-len(others) :], state=WorkerState.READY)
        failure = watch.failure(WorkerState.READY)
        assert failure is None if index == 0 else failure[1] == 2
    assert capsys.readouterr().out.count("*** worker 1 (b:2): seed\n") == 1


def test_a_worker_of_an_elastic_cluster_waits_for_a_chief_that_starts_itself_again():
    watch = Watch(index=1, sizes=(1, 3))
    for row in (status(0, state=WorkerState.FAILED, failure="worker 2 is missing"), status(0, 2)):
        watch.read(row, state=WorkerState.READY)
        assert watch.failure(WorkerState.READY, after=START_TIMEOUT_SECS - 1) is None
    watch.read(status(0, 3, state=WorkerState.FAILED, failure="too few", is_final=True), state=WorkerState.READY)
    assert watch.failure(WorkerState.READY)[0] == "too few"


def test_a_chief_that_is_over_before_a_worker_has_started_was_of_an_earlier_training():
    watch = Watch(index=1)
    watch.read(status(0, state=WorkerState.OVER), state=WorkerState.STARTING)
    assert watch.failure(WorkerState.STARTING) is None
    text, _ = watch.failure(WorkerState.STARTING, after=START_TIMEOUT_SECS + TIMEOUT_SECS + 1)
    assert text.startswith("worker 0 (the chief, a:1) has not started for 1831 s. ")
    watch.read(status(0, 2, state=WorkerState.FAILED, failure="no data"), state=WorkerState.STARTING)
    assert watch.failure(WorkerState.STARTING)[0].endswith("no data")


def test_the_chief_hears_nothing_of_workers_that_are_still_with_an_earlier_start_of_it():
    watch, stale = Watch(), dict(chief="an earlier start")
    for each in (status(1, state=WorkerState.FAILED, **stale), status(1, state=WorkerState.READY, **stale)):
        watch.read(status(0), each, status(2), state=WorkerState.STARTING)
        assert watch.failure(WorkerState.STARTING) is None
        assert watch.detector.statuses[1] == WorkerStatus()


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_without_heartbeats_is_missing(index):
    """The chief watches all, the others the chief."""
    watch = Watch(index)
    first, second = ([status(0), status(1), status(2)], [status(0), status(1, 2), status(2)])
    for statuses in (first, second):
        watch.read(*(statuses if index == 0 else statuses[:1]))
        assert watch.failure(after=20) is None or statuses is second
    name = "worker 2 (c:3)" if index == 0 else "worker 0 (the chief, a:1)"
    text, exit_status = watch.failure()
    assert exit_status == 138
    assert text.startswith(f"{name} is missing: no sign of life for 40 s, last seen at step 6. ")
    assert watch.detector.is_silent(2 if index == 0 else 0) and not (index == 0 and watch.detector.is_silent(1))


def test_a_worker_that_was_started_again_is_a_failure_once_there_was_an_agreement():
    for state, is_failure in ((WorkerState.STARTING, False), (WorkerState.TRAINING, True)):
        watch, follower = Watch(), Watch(index=1)
        watch.read(status(0), status(1), status(2), state=state)
        assert watch.failure(state) is None
        watch.read(status(0), status(1, start_id="another"), status(2), state=state)
        follower.read(status(0, start_id="another"), state=state)
        failures = watch.failure(state), follower.failure(state)
        assert [failure is not None for failure in failures] == [is_failure] * 2
    assert failures[0][0].startswith(
        "worker 1 (b:2) is lost: it no longer answers at step 7, and another process has come in its place. "
    )
    assert failures[1][0].startswith("worker 0 (the chief, a:1) is lost: it no longer answers at step 7, and another ")


def test_who_finishes_waits_for_nobody_that_is_gone():
    watch, mine = Watch(), status(0, state=WorkerState.DONE, members=STARTS)
    for row, is_gone in (
        (status(1), False),
        (status(1, start_id="another"), True),
        (status(1, state=WorkerState.FAILED), True),
        (status(1, chief="an earlier start"), True),
    ):
        watch.detector.note([status(0), row, status(2)], mine)
        assert watch.detector.is_gone(1, mine) == is_gone
    watch.seconds += TIMEOUT_SECS + 1
    assert watch.detector.is_gone(2, mine)
    chief, follower = Watch(), Watch(index=1)
    assert chief.failure(WorkerState.DONE, after=10_000) is None
    follower.read(status(0, state=WorkerState.OVER))
    assert follower.failure(WorkerState.DONE, after=10_000) is None


def test_a_status_is_read_as_it_was_written():
    written = status(
        1, state=WorkerState.READY, facts={"--seed": 5}, steps=(3, 9), members=("x",), stopped_by="last step"
    )
    assert WorkerStatus.from_json(written.to_json()) == written
    for text in ("{}", "", "[]", "5", "null", "{", '"x"', "[" * 5000, b"\xff"):
        assert WorkerStatus.from_json(text) is None


MEAN, INPUT, IDLE, TOWERS = failures.FOR_AVERAGING, failures.FOR_INPUT, failures.FOR_PROGRAM, "tower_0, tower_1"


@pytest.mark.parametrize(
    ("index", "obstacles", "who"),
    [
        (0, (MEAN, MEAN, ("tower_1", TIMEOUT_SECS + 9)), "worker 2 (c:3) waits for tower_1"),
        (0, (MEAN, MEAN, INPUT), "worker 2 (c:3) waits for the input: the examples of"),
        (0, (MEAN, MEAN, ("tower_1", TIMEOUT_SECS - 1)), None),
        (0, (MEAN, MEAN, MEAN), "worker 0 (the chief, a:1) waits for the averaging between dev"),
        (0, (MEAN, MEAN, ("", 0)), None),  # the third one saves or evaluates
        (0, (TOWERS, TOWERS, INPUT), "worker 2 (c:3) waits for the input"),  # towers that normalise wait for its towers
        (1, (MEAN,), None),
        (0, (IDLE, IDLE, IDLE), None),  # as after the last step, while the chief evaluates
        (0, (IDLE, IDLE, MEAN), "worker 0 (the chief, a:1) waits for its program or its input: it has no grad"),
        (1, (IDLE,), "worker 0 (the chief, a:1) waits for its program"),
    ],
)
def test_a_worker_that_lives_and_takes_no_part_in_a_step_is_named_after_the_time_of_a_missing_one(
    index, obstacles, who
):
    """Of workers, of which those that are not the chief see the chief, and wait for the averaging themselves."""
    watch, rows = Watch(index), []
    for what in [*obstacles, MEAN] if index else obstacles:
        what, secs = (what, TIMEOUT_SECS + 1) if isinstance(what, str) else what
        rows.append(dict(stalled=what, stalled_secs=secs))
    mine = dataclasses.replace(watch.own(WorkerState.TRAINING), **rows[index])
    watch.detector.note([status(worker, **row) for worker, row in enumerate(rows[: len(obstacles)])], mine)
    failure = watch.detector.find(mine)
    assert (failure is None) == (who is None)
    if who:
        assert failure.exit_status == 138 and f"stands still, for 31 s since that was seen: {who}" in str(failure)
        assert str(failure).startswith("Step 8 ") and "goes on from the last checkpoint" in str(failure)
    assert watch.detector.find(dataclasses.replace(mine, state=WorkerState.DONE)) is None


def test_who_has_ended_is_named_by_those_whose_step_waits_for_it_and_not_before():
    for index, ended in ((0, 1), (1, 0)):
        for state in (WorkerState.DONE, WorkerState.GONE):
            watch = Watch(index)
            others = [status(0), status(1), status(2)] if index == 0 else [status(0)]
            others[ended] = status(ended, state=state)
            waiting = dataclasses.replace(watch.own(WorkerState.TRAINING), waiting_secs=29.0)
            watch.detector.note(others, waiting)
            assert watch.detector.find(waiting) is None
            error = watch.detector.find(dataclasses.replace(waiting, waiting_secs=31.0))
            name = f"worker {ended} ({'the chief, ' * (ended == 0)}{HOSTS[ended]})"
            assert str(error).startswith(f"{name} has ended after step 6, but step 8 waits for it.")
            assert error.exit_status == 2


def test_tensors_of_different_sizes_are_known_by_either_error_of_tensorflows():
    for text in ("Shape mismatch in the collective instance 5", "[5] Tensor Size Mismatch"):
        assert failures.is_of_sizes(tf.errors.InternalError(None, None, text))
        assert not failures.is_of_sizes(KeyError(text))
