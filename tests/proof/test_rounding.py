"""One rule of rounding for Keras models and Estimators."""

import numpy as np
import pytest

from tower_train import errors
from tower_train.proof.rounding import compare_values

ONE, EQUAL = np.ones(3), "2 towers equal one device on this model to "


@pytest.mark.parametrize(
    ("several", "nearby", "line"),
    [
        (1 + 1e-15, [], f"{EQUAL}1e-15 (2 steps of 8 examples, alike)"),
        (1.0001, [1, 1.00001], f"{EQUAL}1e-04 (2 steps of 8 examples, alike)"),
        (3, [1.1], "*** 2 towers differ from one device by 2e+00, as one device does once its weights are rounded"),
        (1.01, [1.00001], ""),
        (np.nan, [1.00001], ""),
    ],
)
def test_a_difference_is_told_if_rounding_explains_it_and_else_refused(several, nearby, line):
    values = ["v", "w"], [ONE, ONE], [ONE, ONE * several], [[ONE, ONE * each] for each in nearby], 2, ", alike"
    if line:
        assert compare_values(*values).startswith(line)
    else:
        with pytest.raises(errors.GraphError, match="differ from one device on this model: w by "):
            compare_values(*values)
