"""The decision who trains along in an elastic cluster, from who is there alone."""

import pytest

from tower_train import errors
from tower_train.cluster.rendezvous import RESIZED, Memory, Rendezvous
from tower_train.cluster.task import Policy, Task

HOSTS = ("a:1", "b:2", "c:3", "d:4", "e:5")
SETTLE_SECS, START_TIMEOUT_SECS = 30.0, 1800.0


class Chief:
    def __init__(self, sizes=(2, 4), **memory):
        self.seconds = 1000.0
        policy = Policy(SETTLE_SECS, START_TIMEOUT_SECS, sizes=sizes)
        self.rendezvous = Rendezvous(Task(HOSTS, 0), policy, Memory(**memory), clock=lambda: self.seconds)

    def choose(self, *ready, after=0.0):
        self.seconds += after
        return self.rendezvous.choose(ready)


@pytest.mark.parametrize(
    ("chief", "looks"),
    [
        ({}, [((4, 1, 3), 0, (0, 1, 3, 4))]),  # all that may take part begin at once
        ({}, [((4, 1, 2, 3), 0, (0, 1, 2, 3))]),  # and others are spare
        (dict(sizes=(1, 1)), [((), 0, (0,))]),
        # Fewer begin when nobody has come for a while.
        ({}, [((), 29, None), ((3,), 0, None), ((1, 3), 29, None), ((1, 3), 29, None), ((1, 3), 2, (0, 1, 3))]),
        # Those that are left of a start begin at once.
        (dict(group=(0, 2, 3)), [((2,), 0, None), ((2, 3), 0, (0, 2, 3))]),
        (dict(sizes=(3, 4), group=(0, 2)), [((2,), 0, None), ((2,), 31, None), ((2, 4), 0, (0, 2, 4))]),
        (dict(idle_starts=9), [((1, 2, 3), 0, (0, 1, 2, 3))]),
    ],
)
def test_who_begins(chief, looks):
    chief = Chief(**chief)
    assert [chief.choose(*ready, after=secs) for ready, secs, _ in looks] == [group for *_, group in looks]


def test_a_start_is_prepared_for_a_group_of_allowed_size_with_oneself():
    for task, group, sizes, expected in (
        (0, (), (2, 4), [0, 1, 2, 3]),
        (4, (), (2, 4), [1, 2, 3, 4]),
        (0, (0, 2, 3), (2, 4), [0, 2, 3]),
        (0, (0,), (2, 4), [0, 1, 2, 3]),
        (4, (0,), (3, 4), [1, 2, 3, 4]),
        (0, (0, 2, 4), (1, 2), [0, 2]),
    ):
        policy = Policy(SETTLE_SECS, START_TIMEOUT_SECS, sizes=sizes)
        assert Rendezvous(Task(HOSTS, task), policy, Memory(group)).expected == expected


def test_too_few_wait_and_then_leave_for_good(capsys):
    chief = Chief(sizes=(3, 4))
    assert chief.choose(1, after=30) is None and capsys.readouterr().out == ""
    chief.seconds -= 30
    for _ in range(6):
        assert chief.choose(1, after=299) is None
    assert capsys.readouterr().out.splitlines() == ["*** Waiting: 2 of 3 to 4 workers are there."] * 6
    with pytest.raises(errors.WorkerError, match="^2 of 3 to 4 workers are there, and no more have come") as left:
        chief.choose(1, after=7)
    assert left.value.exit_status == 138 and left.value.is_final


def test_who_waits_is_taken_in_once_the_others_have_trained_for_a_while():
    rendezvous = Chief().rendezvous
    for group, ready, trained_secs, grows in (
        ((0, 1), [2], 31, True),
        ((0, 1), [2], 30, False),
        ((0, 1), [2], None, False),
        ((0, 1), [], 31, False),
        ((0, 1, 2, 3), [4], 31, False),
    ):
        assert rendezvous.is_to_grow(group, ready, trained_secs) == grows


def test_starts_that_come_to_no_step_have_an_end():
    with pytest.raises(errors.WorkerError, match="^10 starts in a row ended before their first step") as left:
        Chief(idle_starts=10).choose(1, 2, 3)
    assert left.value.is_final


def test_who_is_told_to_end_leaves_the_others_of_an_elastic_cluster_and_ends_all_of_another():
    for sizes, reasons, expected in (
        ((2, 4), {1: "SIGTERM", 2: None}, RESIZED),
        (None, {1: "SIGTERM", 2: None}, "SIGTERM"),
        (None, {1: None}, None),
        ((2, 4), {1: RESIZED, 2: "the program"}, "the program"),
    ):
        rendezvous = Chief(sizes=sizes).rendezvous
        assert rendezvous.agreed_reason(None, reasons) == expected
        assert rendezvous.leaving == ({1} if expected == RESIZED else set())
        assert rendezvous.agreed_reason("last step", reasons) == "last step"


def test_what_is_remembered_is_read_as_it_was_written(monkeypatch):
    written = Memory((0, 3), 1, (2,))
    [(name, value)] = written.environment().items()
    assert Memory.from_environment() == Memory()
    monkeypatch.setenv(name, value)
    assert Memory.from_environment() == written
