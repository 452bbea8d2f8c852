"""Sides take turns: everything is measured equally often, in changing order, and together with its anchors."""

import pytest

from tower_train.bench import measure
from tower_train.bench.sides import Side


def sides(*names):
    return [Side(name, f"module:{'multiply' if name == 'ceiling' else 'train'}") for name in names]


def measured(chosen, workers, count=6, **options):
    return measure.in_rounds(chosen, workers.start, count, 0.5, **options)


def test_every_side_is_measured_once_a_round_in_an_order_that_changes(fake_workers):
    workers = fake_workers()
    results = measured(sides("a", "b", "c"), workers)
    assert [what for what, _ in workers.log[:3]] == ["start"] * 3 and not workers.live
    turns = [name for what, name in workers.log if what == "measure"]
    orders = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(orders) == 6
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    for result in results:
        assert list(result.rates) == list(range(6))


def test_rates_are_examples_per_second(fake_workers):
    (result,) = measured(sides("a"), fake_workers(), count=2)
    assert result.rates == {0: 10 * 8 / 0.5, 1: 10 * 8 / 0.5}
    assert (result.first_step_secs, result.peak_bytes, result.idle_secs) == (3.0, 1001, 2.0)


def test_where_memory_is_short_groups_are_measured_each_with_the_anchors(fake_workers):
    workers = fake_workers()
    chosen = sides("port", "a", "b", "c", "ceiling")
    found = {result.side.name: result for result in measured(chosen, workers, count=2, has_memory=lambda _: False)}
    assert workers.most_live == 3 and list(found) == ["port", "a", "b", "c", "ceiling"]
    assert list(found["port"].rates) == list(found["ceiling"].rates) == [0, 1, 2, 3, 4, 5]
    for first_round, name in [(0, "a"), (2, "b"), (4, "c")]:
        assert list(found[name].rates) == [first_round, first_round + 1]


def test_room_is_asked_for_as_much_as_the_largest_side_took(fake_workers):
    asked = []
    measured(sides("a", "b", "c"), fake_workers(), count=1, has_memory=lambda size: asked.append(size) or True)
    assert asked == [1250]


def test_when_one_side_fails_all_end(fake_workers):
    workers = fake_workers(failing="b")
    with pytest.raises(RuntimeError):
        measured(sides("a", "b", "c"), workers)
    assert not workers.live
