"""The parts of a step, from a trace of real steps or one as on GPUs."""

import json

import pytest
import tensorflow as tf
import toy_workload

from tower_train.bench import attribution, breakdown
from tower_train.bench.attribution import Operation
from tower_train.bench.sides import BenchmarkOptions
from tower_train.graph import transfer


def operation(name, start, end):
    return Operation(name, "/cpu:0", start, end)


def seconds_of(*spans):
    """Of (operation, start, end)."""
    return attribution.seconds_by_part([operation(*span) for span in spans])


def test_parts_that_follow_each_other_take_their_own_time_and_share_it_if_they_run_at_once():
    """Two operations of one tower are not more than one; waiting for input costs nothing while something else runs."""
    update = "train/then/_9/GradientDescent/update_w/ResourceApplyGradientDescent"
    towers = ("tower_0/Conv2D", 12.0, 17.0), ("average_gradients/AddN", 17.0, 17.5)
    assert seconds_of(("IteratorGetNext", 10.0, 12.0), *towers, (update, 18.0, 19.0)) == {
        "input wait": 2.0,
        "tower_0": 5.0,
        "average_gradients": 0.5,
        "no operation running": 0.5,
        "train": 1.0,
    }
    towers = ("tower_0/Conv2D", 1.0, 3.0), ("tower_0/MatMul", 1.0, 2.0), ("tower_1/Conv2D", 2.0, 4.0)
    found = seconds_of(("IteratorGetNext", 0.0, 4.0), *towers)
    assert found == pytest.approx({"input wait": 1.0, "tower_0": 1.5, "tower_1": 1.5})


def trace(devices):
    """A RunMetadata with {device: [(node name, timeline label, start, end in microseconds)]}."""
    metadata = tf.compat.v1.RunMetadata()
    for device, nodes in devices.items():
        of_device = metadata.step_stats.dev_stats.add(device=device)
        for name, label, start, end in nodes:
            of_device.node_stats.add(
                node_name=name,
                timeline_label=label,
                all_start_micros=start - 2,
                op_start_rel_micros=2,
                op_end_rel_micros=end - start + 2,
                all_end_rel_micros=end - start + 5,
            )
    return metadata


def test_of_a_gpu_the_kernels_count_and_not_their_launches_nor_waiting_for_another_device():
    gpu, kernel = "/device:GPU:0", "tower_0/conv1/Conv2D:Conv2D"
    traced = trace(
        {
            "/cpu:0": [("AddN/_3", "AddN/_3 = _Recv()", 0, 900), ("_SOURCE", "", 0, 0)],
            gpu: [("tower_0/conv1/Conv2D", "tower_0/conv1/Conv2D = Conv2D(a, b)", 100, 110)],
            f"{gpu}/stream:all": [(kernel, "", 120, 400)],
            f"{gpu}/stream:14": [(kernel, "", 120, 400)],
        }
    )
    (found,) = breakdown.traced_operations(traced)
    assert found.part == "tower_0" and found.end - found.start == pytest.approx(280e-6)


def test_a_step_of_the_trainer_has_all_parts(cifar10_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(breakdown, "_TOY_STEPS", 5)
    options = dict(data_dir=str(cifar10_dir), dataset="cifar10", batch_size=8, seconds=0.1, device="cpu", towers=(2,))
    lines = breakdown.run(BenchmarkOptions(out=str(tmp_path), **options))
    assert lines[-2] == f"Written:  {tmp_path / 'breakdown.json'}, {tmp_path / 'trace-2.json'}"
    assert [line.partition(":")[0] for line in lines if "toy" in line] == [
        "A step of a toy network in a run",
        "A step of a toy network as a bare callable",
    ]
    content = json.loads((tmp_path / "breakdown.json").read_text())
    (found,) = content["breakdowns"]
    found = attribution.Breakdown(**found)
    towers = "tower_0", "tower_1"
    for part in (*towers, "average_gradients", "weight_decay", "check_finite", "train"):
        assert found.seconds[part] > 0, part
    common = (part for part in found.seconds if part not in towers and part not in ("input wait", attribution.NOTHING))
    assert found.share(*towers) > found.share(*common)  # also where other processes leave no cores for a while
    assert 0 < found.step_secs < 1
    for secs, main_thread_secs in content["python"].values():
        assert 0 < main_thread_secs < secs < 1


@pytest.mark.parametrize("is_staged", [False, True], ids=["fetched in the step", "staged"])
def test_a_slow_input_is_what_a_step_waits_for(is_staged, monkeypatch):
    monkeypatch.setattr(transfer, "are_gpus", lambda devices: is_staged)
    options = BenchmarkOptions(workload="toy_workload:SLOW", dataset="auto", batch_size=8, seconds=0.2, device="cpu")
    found, _, _ = breakdown.measure(options, 1)
    assert found.seconds["input wait"] > 0.5 * toy_workload.SLOW_SECS
    assert found.step_secs > 0.9 * toy_workload.SLOW_SECS
