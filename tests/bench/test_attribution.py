"""Every operation belongs to a part of the step, the parts add up to it, and the sentence follows from the figures."""

import pytest

from tower_train.bench import attribution
from tower_train.bench.attribution import Breakdown, Operation


def operation(name, start, end, device="/cpu:0"):
    return Operation(name, device, start, end)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("IteratorGetNext", "input wait"),
        ("tower_0/conv1/Conv2D", "tower 0"),
        ("tower_12/gradients/tower_12/local3/MatMul_grad/MatMul", "tower 12"),
        ("ConstantFolding/tower_1/gradients/tower_1/conv2/Conv2D_grad/ShapeN-matshapes-0", "tower 1"),
        ("GroupCrossDeviceControlEdges_0/ConstantFolding/tower_1/gradients/ShapeN-matshapes-1/_7", "tower 1"),
        ("joined/gradients/tower_0/conv2/MatMul_1_grad/MatMul", "all towers"),
        ("average_gradients/AddN_3", "averaging"),
        ("weight_decay/gradients/local3/weights/Regularizer/L2Loss_1_grad/mul", "weight decay, finiteness check"),
        ("local3/weights/Regularizer/L2Loss_1", "weight decay, finiteness check"),
        ("check_finite/IsFinite_4", "weight decay, finiteness check"),
        ("train/tower_1/gradients/tower_1/local4/MatMul_grad/MatMul_1/_146", "update"),
        ("train/then/_90/GradientDescent/update_local3/weights/ResourceApplyGradientDescent", "update"),
        ("Func/train/then/_90/input/_295", "update"),
        ("train/then/_90/ExponentialMovingAverage/AssignMovingAvg_4/sub_1", "moving averages"),
        ("floordiv", "other operations"),
    ],
)
def test_names_of_operations(name, category):
    assert operation(name, 0, 1).category == category


def test_parts_that_follow_each_other_take_their_own_time():
    seconds = attribution.seconds_by_category(
        [
            operation("IteratorGetNext", 10.0, 12.0),
            operation("tower_0/Conv2D", 12.0, 17.0),
            operation("average_gradients/AddN", 17.0, 17.5),
            operation("train/then/_9/GradientDescent/update_w/ResourceApplyGradientDescent", 18.0, 19.0),
        ]
    )
    assert seconds == {
        "input wait": 2.0, "tower 0": 5.0, "averaging": 0.5, "no operation running": 0.5, "update": 1.0,
    }  # fmt: skip


def test_what_runs_at_the_same_time_shares_it():
    """Two operations of one tower are not more than one; waiting for input costs nothing while something else runs."""
    seconds = attribution.seconds_by_category(
        [
            operation("IteratorGetNext", 0.0, 4.0),
            operation("tower_0/Conv2D", 1.0, 3.0),
            operation("tower_0/MatMul", 1.0, 2.0),
            operation("tower_1/Conv2D", 2.0, 4.0),
        ]
    )
    assert seconds == pytest.approx({"input wait": 1.0, "tower 0": 1.5, "tower 1": 1.5})


def test_the_parts_add_up_to_the_step():
    operations = [
        operation(f"tower_{i % 3}/op", start, start + length)
        for i, (start, length) in enumerate([(0.0, 3.0), (1.5, 0.0), (2.5, 4.0), (9.0, 1.0), (9.5, 2.5), (9.6, 0.1)])
    ]
    seconds = attribution.seconds_by_category(operations)
    assert sum(seconds.values()) == pytest.approx(12.0)
    assert seconds["no operation running"] == pytest.approx(2.5)


def test_the_late_tower_is_the_one_that_finishes_last():
    operations = [
        operation("tower_0/a", 0.0, 5.0), operation("tower_1/a", 0.0, 4.0), operation("tower_1/b", 4.0, 9.0),
        operation("tower_2/a", 1.0, 6.0), operation("average_gradients/AddN", 9.0, 20.0),
    ]  # fmt: skip
    assert attribution.lateness(operations) == (1, 3.0)
    assert attribution.lateness(operations[:1]) == (0, 0.0)


def breakdown(towers=4, on_gpus=True, step_secs=0.1, busy=0.5, own=0.5, late_secs=0.0, in_place=None, **seconds):
    parts = {"tower 0": 0.1} | {name.replace("_", " "): value for name, value in seconds.items()}
    return Breakdown(towers, on_gpus, step_secs, 2, busy, own, parts, 3, late_secs, in_place)


ONE = breakdown(towers=1, step_secs=0.11)


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (breakdown(input_wait=0.1), "wait for input for 50% of the step (input-bound)"),
        (breakdown(in_place=0.06, input_wait=0.01), "wait for input for 40% of the step (input-bound)"),
        (breakdown(on_gpus=False, in_place=0.06, late_secs=0.03), "(one tower late)"),
        (breakdown(late_secs=0.03), "tower 3 finishes 30.0 ms after the others, which wait for it for 30% of the step"),
        (breakdown(averaging=0.02, update=0.02, moving_averages=0.01), "takes 33% of the step"),
        (breakdown(input_wait=0.02, late_secs=0.05), "(one tower late)"),
        (breakdown(on_gpus=False, busy=0.97, own=0.95, late_secs=0.03), "the 2 cores are 97% busy (cores exhausted)"),
        (breakdown(on_gpus=False, busy=0.97, own=0.5), "97% busy, 47% by other processes (cores exhausted)"),
        (breakdown(on_gpus=False, busy=0.5, input_wait=0.1), "(input-bound)"),
        (breakdown(busy=0.97, input_wait=0.1), "(input-bound)"),
    ],
)
def test_the_sentence_names_the_reason(most, found):
    sentence = attribution.sentence(ONE, most)
    assert sentence.startswith("More towers do not help: ")
    assert found in sentence


def test_the_sentence_says_when_more_towers_help():
    sentence = attribution.sentence(ONE, breakdown(step_secs=0.03, input_wait=0.1))
    assert sentence == "More towers help: 4 are 3.67 times as fast as 1."


def test_the_sentence_says_when_there_is_no_reason():
    assert attribution.sentence(ONE, breakdown()).startswith("Nothing in the step stands in the way")


def test_a_breakdown_has_a_row_for_every_tower_and_a_column_for_every_count():
    one = Breakdown(1, False, 0.011, 2, 0.9, 0.8, {"tower 0": 0.008, attribution.UPDATE: 0.002}, 0, 0.0, 0.0088)
    two = Breakdown(2, False, 0.009, 2, 1.0, 0.8, {"tower 0": 0.004, "tower 1": 0.004}, 1, 0.0)
    lines = {line.split("|")[1].strip(): line.split("|")[2:4] for line in attribution.table([one, two])}
    found = {name: [" ".join(cell.split()) for cell in cells] for name, cells in lines.items()}
    assert found[""] == ["1 tower", "2 towers"]
    assert found["tower 0"] == ["8.0 ms 80%", "4.0 ms 50%"]
    assert found["tower 1"] == ["", "4.0 ms 50%"]
    assert found["update"] == ["2.0 ms 20%", "0.0 ms 0%"]
    assert found["a step, without tracing"] == ["11.0 ms", "9.0 ms"]
    assert found["a step with its input in place"] == ["8.8 ms 80%", ""]
    assert found["cores busy meanwhile"] == ["90% of 2", "100% of 2"]
