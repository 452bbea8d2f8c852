"""A trace of real steps, and what a trace on GPUs looks like."""

import pytest
import tensorflow as tf

from tower_train.bench import attribution, breakdown
from tower_train.bench.options import BenchmarkOptions


def step_stats(**devices):
    """{device: [(node name, timeline label, start, end in microseconds)]} as StepStats."""
    stats = tf.compat.v1.RunMetadata().step_stats
    for device, nodes in devices["devices"].items():
        of_device = stats.dev_stats.add(device=device)
        for name, label, start, end in nodes:
            of_device.node_stats.add(
                node_name=name, timeline_label=label, all_start_micros=start - 2, op_start_rel_micros=2,
                op_end_rel_micros=end - start + 2, all_end_rel_micros=end - start + 5,
            )  # fmt: skip
    return stats


def test_operations_have_the_time_of_their_kernels():
    stats = step_stats(devices={"/cpu:0": [("tower_0/Conv2D", "tower_0/Conv2D = Conv2D(a, b)", 1000, 1500)]})
    (operation,) = breakdown.operations_of(stats)
    assert (operation.name, operation.device) == ("tower_0/Conv2D", "/cpu:0")
    assert (operation.start, operation.end) == pytest.approx((1000e-6, 1500e-6))


def test_waiting_for_another_device_is_no_work():
    stats = step_stats(devices={"/cpu:0": [("AddN/_3", "AddN/_3 = _Recv()", 0, 900), ("_SOURCE", "", 0, 0)]})
    assert breakdown.operations_of(stats) == []


def test_of_a_gpu_the_kernels_count_and_not_their_launches():
    gpu, kernel = "/device:GPU:0", "tower_0/conv1/Conv2D:Conv2D"
    stats = step_stats(
        devices={
            gpu: [("tower_0/conv1/Conv2D", "tower_0/conv1/Conv2D = Conv2D(a, b)", 100, 110)],
            f"{gpu}/stream:all": [(kernel, "", 120, 400)],
            f"{gpu}/stream:14": [(kernel, "", 120, 400)],
        }
    )
    (operation,) = breakdown.operations_of(stats)
    assert operation.category == "tower 0"
    assert operation.end - operation.start == pytest.approx(280e-6)


@pytest.fixture(scope="module")
def measured(cifar10_dir):
    options = BenchmarkOptions(
        data_dir=str(cifar10_dir), dataset="cifar10", batch_size=8, seconds=0.1, device="cpu", towers=(2,)
    )
    return breakdown.measure(options, towers=2)


def test_a_step_of_the_trainer_has_all_parts(measured):
    found, _, _ = measured
    for part in ("tower 0", "tower 1", attribution.AVERAGING, attribution.UPDATE, attribution.MOVING_AVERAGES):
        assert found.seconds[part] > 0, part
    assert found.share("tower 0", "tower 1") > 0.5
    assert found.share(attribution.OTHER) < 0.1
    assert 0 < found.own <= found.busy <= 1
    assert 0 < found.step_secs < 1


def test_what_the_update_does_is_recognised(measured):
    """Names of operations are the trainer's to choose; where they change, the patterns have to follow."""
    _, operations, _ = measured
    categories = {operation.name.rpartition("/_90/")[2]: operation.category for operation in operations}
    of_kind = {
        kind: {category for name, category in categories.items() if kind in name}
        for kind in ("ResourceApplyGradientDescent", "AssignMovingAvg", "Regularizer", "IsFinite", "IteratorGetNext")
    }
    assert of_kind == {
        "ResourceApplyGradientDescent": {attribution.UPDATE},
        "AssignMovingAvg": {attribution.MOVING_AVERAGES},
        "Regularizer": {attribution.DECAY_AND_CHECK},
        "IsFinite": {attribution.DECAY_AND_CHECK},
        "IteratorGetNext": {attribution.INPUT_WAIT},
    }
