"""The decision who trains along in an elastic cluster, from who is there alone."""

import pytest

from tower_train import errors
from tower_train.cluster.rendezvous import Memory, Rendezvous
from tower_train.cluster.task import Task

HOSTS = ("a:1", "b:2", "c:3", "d:4", "e:5")
SETTLE_SECS, START_TIMEOUT_SECS = 30.0, 1800.0


class Chief:
    """A rendezvous whose time passes when told to."""

    def __init__(self, sizes=(2, 4), **memory):
        self.seconds = 1000.0
        self.rendezvous = Rendezvous(Task(HOSTS, 0), sizes, Memory(**memory), SETTLE_SECS, START_TIMEOUT_SECS,
                             clock=lambda: self.seconds)  # fmt: skip

    def choose(self, *ready, after=0.0):
        self.seconds += after
        return self.rendezvous.choose(ready)


def test_all_that_may_take_part_begin_at_once_and_the_others_are_spare():
    assert Chief().choose(4, 1, 3) == (0, 1, 3, 4)
    assert Chief().choose(4, 1, 2, 3) == (0, 1, 2, 3)
    assert Chief(sizes=(1, 1)).choose() == (0,)
    # Those that are known stay, though others were there sooner.
    assert Chief(sizes=(2, 3), group=(0, 2, 4)).choose(1, 2, 3, 4) == (0, 2, 4)


def test_fewer_begin_when_nobody_has_come_for_a_while():
    chief = Chief()
    assert chief.choose(after=29) is None
    assert chief.choose(3) is None
    assert chief.choose(1, 3, after=29) is None
    assert chief.choose(1, 3, after=29) is None
    assert chief.choose(1, 3, after=2) == (0, 1, 3)


def test_those_that_are_left_of_a_start_begin_at_once():
    chief = Chief(group=(0, 2, 3))
    assert chief.choose(2) is None
    assert chief.choose(2, 3) == (0, 2, 3)
    too_few = Chief(sizes=(3, 4), group=(0, 2))
    assert too_few.choose(2) is None and too_few.choose(2, after=31) is None
    assert too_few.choose(2, 4) == (0, 2, 4)


def test_a_start_is_prepared_for_a_group_of_allowed_size_with_oneself():
    for task, group, sizes, expected in (
        (0, (), (2, 4), [0, 1, 2, 3]), (4, (), (2, 4), [0, 1, 2, 4]), (0, (0, 2, 3), (2, 4), [0, 2, 3]),
        (0, (0,), (2, 4), [0, 1]), (0, (0, 3), (3, 4), [0, 1, 3]), (4, (0,), (3, 4), [0, 1, 4]),
        (0, (0, 2, 4), (1, 2), [0, 2]), (2, (0, 9), (1, 2), [2]),
    ):  # fmt: skip
        assert Memory(group).expected(Task(HOSTS, task), sizes) == expected


def test_too_few_wait_and_then_leave_for_good(capsys):
    chief = Chief(sizes=(3, 4))
    for _ in range(6):
        assert chief.choose(1, after=299) is None
    assert capsys.readouterr().out.splitlines() == ["*** Waiting: 2 of 3 to 4 workers are there."] * 6
    with pytest.raises(errors.WorkerError, match="^2 of 3 to 4 workers are there, and no more have come") as left:
        chief.choose(1, after=7)
    assert left.value.exit_status == 138 and left.value.is_final


def test_who_waits_is_taken_in_once_the_others_have_trained_for_a_while():
    rendezvous = Chief().rendezvous
    for group, ready, trained_secs, grows in (
        ((0, 1), [2], 31, True), ((0, 1), [2], 29, False), ((0, 1), [2], None, False), ((0, 1), [], 31, False),
        ((0, 1, 2, 3), [4], 31, False),
    ):  # fmt: skip
        assert rendezvous.is_to_grow(group, ready, trained_secs) == grows


def test_who_is_lost_before_a_first_step_again_and_again_is_taken_in_no_more(capsys):
    """A step of a start with it makes good what was before."""
    memory = Memory(strikes={1: 1})
    for has_stepped, group, lost, strikes in (
        (True, (0, 1, 2), {2}, {}), (False, (0, 1, 2), {2}, {0: 1, 2: 1}), (True, (0, 1), set(), {2: 1}),
        (True, (0, 1, 2), {2}, {}), (False, (0, 1, 2), {2}, {0: 1, 2: 1}), (False, (0, 1, 2), {2}, {0: 2, 2: 2}),
        (True, (0, 1), set(), {2: 2}), (False, (0, 1, 2), {1, 2}, {0: 1, 1: 1, 2: 3}), (True, (0, 1), set(), {2: 3}),
        (False, (0, 2), {2}, {0: 1, 2: 4}), (False, (0, 2), {2}, {0: 2, 2: 5}),
    ):  # fmt: skip
        memory = memory.after(has_stepped, group, lost, set(group) - lost)
        assert memory.strikes == strikes
    chief = Chief(strikes=memory.strikes)
    assert not chief.rendezvous.is_to_grow((0, 1), [2], 31) and chief.rendezvous.is_to_grow((0, 1), [2, 3], 31)
    chief.choose(1, 2)
    assert chief.choose(1, 2, after=31) == (0, 1)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("*** worker 2 (c:3) was lost 5 times in a row before its first step, and is not taken in")


def test_starts_that_come_to_no_step_have_an_end():
    memory = Memory()
    for _ in range(10):
        memory.check_idle_starts()
        memory = memory.after(False, (0, 1), (), (0, 1))
    with pytest.raises(errors.WorkerError, match="^10 starts in a row ended before their first step") as left:
        memory.check_idle_starts()
    assert left.value.is_final
    memory.after(True, (0, 1), (), (0, 1)).check_idle_starts()


def test_what_is_remembered_is_read_as_it_was_written(monkeypatch):
    written = Memory((0, 3), {2: 1})
    [(name, value)] = written.environment().items()
    assert Memory.of_environment() == Memory()
    monkeypatch.setenv(name, value)
    assert Memory.of_environment() == written
