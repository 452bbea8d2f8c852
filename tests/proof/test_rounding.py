"""One rule of rounding for Keras models and Estimators."""

import numpy as np
import pytest

from tower_train import errors
from tower_train.proof.rounding import compare_values

ONE, EQUAL = np.ones(3), "2 towers equal one device on this model to "


@pytest.mark.parametrize(
    ("before", "one", "several", "nearby", "line"),
    [
        (0, 1, 1 + 1e-15, [], f"{EQUAL}1e-15 (2 steps of 8 examples, alike)"),
        (0, 1, 1.0001, [1, 1.00001], f"{EQUAL}1e-04 (2 steps of 8 examples, alike)"),
        (0, 1, 1.001, [1, 1, 1.0002], f"{EQUAL}1e-03 (2 steps of 8 examples, alike)"),
        (0, 1, 3, [1.1], "*** 2 towers differ from one device by 2e+00, as one device does once its weights are round"),
        (0, 1, 1.01, [1.00001], ""),
        (0, 1, 1.01, [1, 1, 1.001], ""),  # further from the weights, less is explained
        (0, 1, np.nan, [1.00001], ""),
        (0, np.nan, 1, [np.nan], ""),
        (0, np.nan, np.nan, [], "*** towers: nothing to compare: the loss of 8 examples is not finite"),
        (1, 1, 1, [], "*** towers: nothing to compare: no weight changes in 2 steps of 8 examples"),
        (1, 0.5, 0.5, [], "*** towers: nothing to compare: no weight changes in 2 steps of 8 examples, but for weight"),
        (1, 1, 2, [1], ""),
    ],
)
def test_a_difference_is_told_if_rounding_explains_it_and_else_refused(before, one, several, nearby, line):
    def near(seed):
        return [ONE, ONE * (one if seed is None else nearby[min(seed, len(nearby) - 1)])]

    values = ["v", "w"], [ONE, ONE * one], [ONE, ONE * several], near, {1: ONE * before}, 2, ", alike"
    if line:
        assert compare_values(*values).startswith(line)
    else:
        with pytest.raises(errors.GraphError, match="differ from one device on this model: w by "):
            compare_values(*values)


def test_of_what_draws_anew_each_time_no_difference_is_rounding():
    with pytest.raises(errors.GraphError, match="differ from one device on this model: w by 1e-01"):
        compare_values(["w"], [ONE], [ONE * 1.1], lambda seed: [ONE * 1.2], {0: 0 * ONE}, 2, "")
