"""Every operation belongs to a part of the step, the parts add up to it, and the sentence follows from the figures."""

import pytest

from tower_train.bench import attribution
from tower_train.bench.attribution import Breakdown, Operation


def operation(name, start, end, device="/cpu:0"):
    return Operation(name, device, start, end)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("IteratorGetNext", "input wait"),
        ("next_batch/IteratorGetNext", "input wait"),
        ("tower_0/conv1/Conv2D", "tower_0"),
        ("tower_12/gradients/tower_12/local3/MatMul_grad/MatMul", "tower_12"),
        ("ConstantFolding/tower_1/gradients/tower_1/conv2/Conv2D_grad/ShapeN-matshapes-0", "tower_1"),
        ("GroupCrossDeviceControlEdges_0/ConstantFolding/tower_1/gradients/ShapeN-matshapes-1/_7", "tower_1"),
        ("Func/train/then/_90/input/_295", "train"),
        ("floordiv", "floordiv"),
    ],
)
def test_an_operation_belongs_to_its_outermost_name_scope(name, part):
    assert operation(name, 0, 1).part == part


def test_parts_that_follow_each_other_take_their_own_time():
    seconds = attribution.seconds_by_part(
        [
            operation("IteratorGetNext", 10.0, 12.0),
            operation("tower_0/Conv2D", 12.0, 17.0),
            operation("average_gradients/AddN", 17.0, 17.5),
            operation("train/then/_9/GradientDescent/update_w/ResourceApplyGradientDescent", 18.0, 19.0),
        ]
    )
    assert seconds == {
        "input wait": 2.0, "tower_0": 5.0, "average_gradients": 0.5, "no operation running": 0.5, "train": 1.0,
    }  # fmt: skip


def test_what_runs_at_the_same_time_shares_it():
    """Two operations of one tower are not more than one; waiting for input costs nothing while something else runs."""
    seconds = attribution.seconds_by_part(
        [
            operation("IteratorGetNext", 0.0, 4.0),
            operation("tower_0/Conv2D", 1.0, 3.0),
            operation("tower_0/MatMul", 1.0, 2.0),
            operation("tower_1/Conv2D", 2.0, 4.0),
        ]
    )
    assert seconds == pytest.approx({"input wait": 1.0, "tower_0": 1.5, "tower_1": 1.5})


def breakdown(towers=4, on_gpus=True, step_secs=0.1, busy=0.5, busy_here=0.5, in_place=None, **seconds):
    parts = {"tower_0": 0.1} | {name.replace("input_wait", "input wait"): value for name, value in seconds.items()}
    return Breakdown(towers, on_gpus, 2, step_secs, busy, busy_here, in_place or step_secs, parts)


ONE = breakdown(towers=1, step_secs=0.11)


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (breakdown(input_wait=0.1), "for 50% of the step the towers wait for input (input-bound)"),
        (breakdown(in_place=0.06, input_wait=0.01), "for 40% of the step the towers wait for input (input-bound)"),
        (breakdown(average_gradients=0.02, train=0.03), "for 33% of the step gradients are averaged and variables"),
        (breakdown(on_gpus=False, busy=0.97, busy_here=0.95, train=0.03), "cores are 97% busy (cores exhausted)"),
        (breakdown(on_gpus=False, busy=0.97), "the 2 cores are 97% busy, 47% by other processes (cores exhausted)"),
        (breakdown(on_gpus=False, busy=0.5, input_wait=0.1), "(input-bound)"),
        (breakdown(busy=0.97, input_wait=0.1), "(input-bound)"),
    ],
)
def test_the_sentence_names_the_reason(most, found):
    sentence = attribution.sentence(ONE, most)
    assert sentence.startswith("More towers do not help: ")
    assert found in sentence
