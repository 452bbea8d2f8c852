"""Mirrored variables train what variables on the CPU train, also where nothing else has the same numbers.

One batch cut among towers or in turn has other batch statistics in each; the network also has a sparse gradient.
"""

import norm_workload
import pytest
import trainings

STEPS = 20
TRAIN = dict(dtype="float64", learning_rate=0.05, ema=0.9, batch_size=4)
CASES = {
    "collective": dict(num_gpus=2, accumulate_steps=2, clip_gradients=0.1, optimizer="momentum"),
    "add_n": dict(num_gpus=3, sync_batch_norm=True, optimizer="adam", learning_rate=0.01),
}


@pytest.mark.parametrize("kind", CASES)
def test_mirrored_variables_end_with_the_values_of_those_on_the_cpu(kind):
    """Losses of every step; weights, optimizer's slots, moving statistics and averages at the end."""
    mirrored, on_cpu = (
        trainings.train(norm_workload.WORKLOAD, norm_workload.load(None), STEPS, **(TRAIN | CASES[kind] | mode))
        for mode in (dict(variable_update="mirrored", all_reduce=kind), dict(variable_update="cpu"))
    )
    trainings.assert_same(mirrored, on_cpu)
