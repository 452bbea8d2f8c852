"""One rule of rounding for workloads, Keras models and Estimators."""

import numpy as np
import pytest

from tower_train import errors
from tower_train.proof.comparison import Values, compare, is_scaled
from tower_train.proof.first import line_of_model

ONE, EQUAL = np.ones(3), "towers:   2 equal 1 on this network to "


@pytest.mark.parametrize(
    ("one", "several", "nearby", "line"),
    [
        (1, 1 + 1e-15, [], f"{EQUAL}1e-15 (2 steps)"),
        (1, 1.0001, [1, 1.00001], f"{EQUAL}1e-04 (2 steps)"),
        (1, 1.001, [1, 1, 1.0002], f"{EQUAL}1e-03 (2 steps)"),
        (1, 3, [1.1], "*** towers: several differ from one by 2e+00, as one does once its weights are rounded"),
        (1, 1.01, [1.00001], ""),
        (1, 1.01, [1, 1, 1.001], ""),  # further from the weights, less is explained
        (1, np.nan, [1.00001], ""),
        (np.nan, 1, [], "*** towers: nothing to compare: the loss is not finite, or its gradients (2 steps)"),
        (np.nan, np.nan, [], "*** towers: nothing to compare: the loss is not finite, or its gradients (2 steps)"),
    ],
)
def test_a_difference_is_told_if_rounding_explains_it_and_else_refused(one, several, nearby, line):
    def training(factor):
        return [Values({"v": ONE, "w": ONE * factor})]

    def of_one(seed):
        return training(one if seed is None else nearby[min(seed, len(nearby) - 1)])

    verdict = compare(of_one, lambda seed: training(several), ["v", "w"], np.finfo(np.float64).eps)
    if line:
        assert line_of_model(verdict, 2, "2 steps").startswith(line)
    else:
        with pytest.raises(errors.GraphError, match="differ from 1 on this network: w "):
            line_of_model(verdict, 2, "2 steps")


def test_of_what_draws_anew_each_time_no_difference_is_rounding():
    drawn = iter(np.arange(1, 20))
    verdict = compare(lambda seed: [Values({"w": ONE * next(drawn)})], lambda seed: [Values({"w": ONE * 1.1})], "w", 0)
    assert verdict.excess


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
