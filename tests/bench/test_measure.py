"""Sides take turns: everything is measured equally often, in changing order, and together with its anchors."""

import pytest

from tower_train.bench import measure, progress
from tower_train.bench.systems import System


def sides(*names, anchors=()):
    return [System(name, "rival", {}, 8, is_anchor=name in anchors) for name in names]


def measured(chosen, workers, count=6, **options):
    session = measure.Session(None, None, {}, {}, workers.start, progress.Progress())
    return measure.in_rounds(session, chosen, count, seconds=0.5, **options)


def test_every_side_is_measured_once_a_round_in_an_order_that_changes(fake_workers):
    workers = fake_workers()
    found = measured(sides("a", "b", "c"), workers)
    assert [what for what, _ in workers.log[:3]] == ["start"] * 3 and not workers.live
    turns = [name for what, name in workers.log if what == "measure"]
    orders = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(orders) == 6
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    for one in found:
        assert [sample["round"] for sample in one.samples] == list(range(6))


def test_rates_are_work_per_second(fake_workers):
    (one,) = measured(sides("a"), fake_workers(), count=1)
    assert one.samples[0]["per_sec"] == 10 * 8 / 0.5
    assert (one.first_step_secs, one.import_secs, one.peak_bytes) == (3.0, 2.0, 1001)


def test_where_memory_is_short_groups_are_measured_each_with_the_anchors(fake_workers):
    workers = fake_workers()
    chosen = sides("port", "a", "b", "c", anchors=["port"])
    found = {one.side.name: one for one in measured(chosen, workers, count=2, has_memory=lambda _: False)}
    assert workers.most_live == 2
    assert [sample["round"] for sample in found["port"].samples] == [0, 1, 2, 3, 4, 5]
    for first_round, name in [(0, "a"), (2, "b"), (4, "c")]:
        assert [sample["round"] for sample in found[name].samples] == [first_round, first_round + 1]


def test_room_is_asked_for_as_much_as_the_largest_side_took(fake_workers):
    asked = []
    measured(sides("a", "b", "c"), fake_workers(), count=1, has_memory=lambda size: asked.append(size) or True)
    assert asked == [1250, 1250]


def test_anchors_alone_are_measured_too(fake_workers):
    workers = fake_workers()
    (one,) = measured(sides("port", anchors=["port"]), workers, count=2)
    assert len(one.samples) == 2


def test_when_one_side_fails_all_end(fake_workers):
    workers = fake_workers(failing="b")
    with pytest.raises(RuntimeError):
        measured(sides("a", "b", "c"), workers)
    assert not workers.live
