"""Sides take turns: everything is measured equally often, in changing order, and together with its anchors."""

import pytest
import sides as fakes

from tower_train.bench import measure
from tower_train.bench.sides import Side


def sides(*names):
    return [Side(name, f"module:{'multiply' if name == 'ceiling' else 'train'}") for name in names]


def measured(chosen, workers, count=6):
    return measure.in_rounds(chosen, workers.start, count, 0.5)


def test_every_side_is_measured_once_a_round_in_an_order_that_changes():
    workers = fakes.FakeWorkers()
    results = measured(sides("a", "b", "c"), workers)
    assert [what for what, _ in workers.log[:3]] == ["start"] * 3 and not workers.live
    turns = [name for what, name in workers.log if what == "measure"]
    orders = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(orders) == 6
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    for result in results:
        assert result.rates == dict.fromkeys(range(6), 10 * 8 / 0.5)


def test_when_one_side_fails_all_end():
    workers = fakes.FakeWorkers(failing="b")
    with pytest.raises(RuntimeError):
        measured(sides("a", "b", "c"), workers)
    assert not workers.live
