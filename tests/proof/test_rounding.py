"""One rule of rounding for workloads, Keras models and Estimators."""

import numpy as np
import pytest

from tower_train.proof.comparison import Comparison, Values, is_scaled

ONE, EQUAL = np.ones(3), "towers:   2 equal 1 on this network to "


def outcome(one, several):
    """of trainings: (values that they begin with) -> the value of w after a step."""

    def training(value):
        return lambda begin: [
            Values({}, {}, {"v": ONE, "w": begin.get("w", ONE)}),
            Values({}, {}, {"v": ONE, "w": ONE * value(begin)}),
        ]

    comparison = Comparison(
        training(one), training(several), ["v", "w"], np.dtype(np.float64), 2, "1 step", lambda *_: "It begins there."
    )
    return comparison.outcome()


@pytest.mark.parametrize(
    ("one", "several", "nearby", "line"),
    [
        (2, 2 + 1e-15, [], f"{EQUAL}4e-16"),
        (2, 2.0001, [2, 2.00001], f"{EQUAL}5e-05"),
        (2, 2.001, [2, 2, 2.0002], f"{EQUAL}5e-04"),
        (2, 5, [2.1], "*** towers: several differ from one by 2e+00, as one does once its weights are rounded"),
        (2, 2.01, [2.00001], ""),
        (2, 2.01, [2, 2, 2.001], ""),  # further from the weights, less is explained
        (2, np.nan, [2.00001], ""),
        (np.nan, 2, [], "*** towers: nothing to compare: the loss is not finite, or its gradients"),
        (np.nan, np.nan, [], "*** towers: nothing to compare: the loss is not finite, or its gradients"),
    ],
)
def test_a_difference_is_told_if_rounding_explains_it_and_else_refused(one, several, nearby, line):
    after = iter(nearby)
    last = nearby[-1:]

    found = outcome(lambda begin: next(after, *last) if begin else one, lambda begin: several)
    if line:
        assert found.line.startswith(line) and not found.differs
    else:
        assert found.differs.startswith("2 towers differ from 1 on this network: w ")
        assert found.differs.endswith(" in step 1 (1 step).\nIt begins there.")


def test_of_what_draws_anew_each_time_no_difference_is_rounding():
    drawn = iter(np.arange(1, 20))
    assert outcome(lambda begin: next(drawn), lambda begin: 1.1).differs


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [0.5, 1, 1.5], True),
        ([1, 2, 3], [1, 2, 2], False),
        ([2], [1], False),
        ([1, 1], [0.5, 0.5], False),
        ([0, 0], [1, 1], False),
    ],
)
def test_what_weight_decay_alone_changes_is_scaled(before, after, expected):
    assert is_scaled(np.array(before), np.array(after)) == expected
