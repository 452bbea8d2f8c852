"""Who is missing, decided from the workers' statuses alone."""

import pytest

from tower_train.cluster.failures import FailureDetector
from tower_train.cluster.status_board import WorkerState, WorkerStatus
from tower_train.cluster.task import Task

HOSTS = ("a:1", "b:2", "c:3")
TRAINING = WorkerStatus(start_id="mine", state=WorkerState.TRAINING, step=7)
TIMEOUT_SECS, START_TIMEOUT_SECS = 30.0, 1800.0


class Watch:
    """A detector whose time passes when told to."""

    def __init__(self, index=0, waits_for_start=False):
        self.seconds = 1000.0
        task = Task(HOSTS, index)
        self.detector = FailureDetector(
            task, TIMEOUT_SECS, START_TIMEOUT_SECS, waits_for_start, clock=lambda: self.seconds
        )

    def read(self, *statuses, state=WorkerState.TRAINING):
        self.detector.note(statuses, state)

    def failure(self, status=TRAINING, after=0.0):
        """(text, exit status) of the failure after so many seconds more; None if there is none."""
        self.seconds += after
        failure = self.detector.find(status)
        return failure and (str(failure), failure.exit_status)


def status(worker, heartbeat=1, **changes):
    return WorkerStatus(**(dict(start_id=f"start of {worker}", heartbeat=heartbeat, step=6) | changes))


def test_workers_that_have_not_started_have_the_time_of_a_start(capsys):
    watch = Watch()
    watch.read(TRAINING, status(1), WorkerStatus(), state=WorkerState.STARTING)
    for heartbeat in range(2, 62):
        watch.read(TRAINING, status(1, heartbeat), WorkerStatus(), state=WorkerState.STARTING)
        assert watch.failure(after=29.9) is None
    waiting = capsys.readouterr().out.splitlines()
    assert 20 < len(waiting) < 60 and set(waiting) == {"*** Waiting for worker 2 (c:3) ..."}
    watch.read(TRAINING, status(1, 62), WorkerStatus(), state=WorkerState.STARTING)
    text, exit_status = watch.failure(after=10)
    assert exit_status == 138
    assert text.startswith("worker 2 (c:3) has not started for 1804 s. ")


def test_with_wait_for_workers_a_start_has_no_limit():
    watch = Watch(index=1, waits_for_start=True)
    watch.read(WorkerStatus(), state=WorkerState.STARTING)
    assert watch.failure(after=10 * START_TIMEOUT_SECS) is None


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
        watch = Watch()
        watch.read(TRAINING, status(1), status(2), state=state)
        watch.read(TRAINING, status(1, start_id="another"), status(2), state=state)
        failure = watch.failure()
        assert (failure is not None) == is_failure
    assert failure[0].startswith("worker 1 (b:2) was started again at step 7. ")


def test_a_failed_worker_is_named_with_its_error_and_its_status():
    failed = status(1, state=WorkerState.FAILED, failure="KeyError", exit_status=1)
    watch = Watch()
    watch.read(TRAINING, failed, status(2))
    assert watch.failure() == ("worker 1 (b:2): KeyError", 1)
    follower = Watch(index=2)
    follower.read(status(0, state=WorkerState.FAILED, failure="worker 1 (b:2): KeyError", exit_status=1))
    assert follower.failure() == ("worker 1 (b:2): KeyError", 1)


def test_whoever_has_done_all_steps_misses_nobody():
    chief, follower = Watch(), Watch(index=1)
    assert chief.failure(status=status(0, state=WorkerState.DONE), after=10_000) is None
    follower.read(status(0, state=WorkerState.OVER))
    assert follower.failure(status=status(1, state=WorkerState.DONE), after=10_000) is None


def test_a_status_is_read_as_it_was_written():
    written = status(1, state=WorkerState.READY, about={"--seed": 5}, steps=[3, 9], stopped_by="last step")
    assert WorkerStatus.from_json(written.to_json()) == written
    assert WorkerStatus.from_json("{}") == WorkerStatus()
    assert WorkerStatus.from_json('{"of_a_later_version": 1, "step": 4}') == WorkerStatus(step=4)
