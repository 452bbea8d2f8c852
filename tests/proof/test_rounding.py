"""One rule of rounding for Keras models and Estimators."""

import numpy as np
import pytest

from tower_train import errors
from tower_train.proof.rounding import compare_values

ONE = np.ones(3)


@pytest.mark.parametrize(
    ("several", "nearby", "line"),
    [
        (ONE * (1 + 1e-15), [], "2 towers equal one device on this model to 1e-15 (2 steps of 8 examples, alike)"),
        (
            ONE * 1.0001,
            [ONE, ONE * 1.00001],
            "2 towers equal one device on this model to 1e-04 (2 steps of 8 examples, alike)",
        ),
        (
            ONE * 3,
            [ONE * 1.1],
            "*** 2 towers differ from one device by 2e+00, as one device does once its weights are ro",
        ),
    ],
)
def test_a_difference_that_rounding_explains_is_told(several, nearby, line):
    assert compare_values(["w"], [ONE], [several], [[each] for each in nearby], 2, ", alike").startswith(line)


@pytest.mark.parametrize("several", [ONE * 1.01, ONE * np.nan])
def test_another_difference_is_refused(several):
    with pytest.raises(errors.GraphError, match="differ from one device on this model: w by "):
        compare_values(["v", "w"], [ONE, ONE], [ONE, several], [[ONE, ONE * 1.00001]], 2, "")
