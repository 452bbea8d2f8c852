"""A trace of real steps, and the form of a trace on GPUs."""

import json

import pytest
import slow_input
import tensorflow as tf

from tower_train.bench import attribution, breakdown
from tower_train.bench.sides import BenchmarkOptions
from tower_train.graph import transfer


def trace(devices):
    """A RunMetadata with {device: [(node name, timeline label, start, end in microseconds)]}."""
    metadata = tf.compat.v1.RunMetadata()
    for device, nodes in devices.items():
        of_device = metadata.step_stats.dev_stats.add(device=device)
        for name, label, start, end in nodes:
            of_device.node_stats.add(
                node_name=name, timeline_label=label, all_start_micros=start - 2, op_start_rel_micros=2,
                op_end_rel_micros=end - start + 2, all_end_rel_micros=end - start + 5,
            )  # fmt: skip
    return metadata


def test_waiting_for_another_device_is_no_work():
    traced = trace({"/cpu:0": [("AddN/_3", "AddN/_3 = _Recv()", 0, 900), ("_SOURCE", "", 0, 0)]})
    assert breakdown.operations_of(traced) == []


def test_of_a_gpu_the_kernels_count_and_not_their_launches():
    gpu, kernel = "/device:GPU:0", "tower_0/conv1/Conv2D:Conv2D"
    traced = trace(
        {
            gpu: [("tower_0/conv1/Conv2D", "tower_0/conv1/Conv2D = Conv2D(a, b)", 100, 110)],
            f"{gpu}/stream:all": [(kernel, "", 120, 400)],
            f"{gpu}/stream:14": [(kernel, "", 120, 400)],
        }
    )
    (operation,) = breakdown.operations_of(traced)
    assert operation.part == "tower_0"
    assert operation.end - operation.start == pytest.approx(280e-6)


@pytest.fixture(scope="module")
def written(cifar10_dir, tmp_path_factory):
    """The directory with what a breakdown of two towers wrote."""
    out = tmp_path_factory.mktemp("breakdown")
    options = BenchmarkOptions(
        data_dir=str(cifar10_dir), dataset="cifar10", batch_size=8, seconds=0.1, device="cpu", towers=(2,), out=str(out)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breakdown, "_TOY_STEPS", 20)
        lines = breakdown.run(options)
    assert lines[-2] == f"Written:  {out / 'breakdown.json'}, {out / 'trace-2.json'}"
    assert [line.partition(":")[0] for line in lines if "toy" in line] == [
        "A step of a toy network in a run", "A step of a toy network as a bare callable",
    ]  # fmt: skip
    return out


def test_a_step_of_the_trainer_has_all_parts(written):
    content = json.loads((written / "breakdown.json").read_text())
    (found,) = content["breakdowns"]
    found = attribution.Breakdown(**found)
    towers = "tower_0", "tower_1"
    for part in (*towers, "average_gradients", "weight_decay", "check_finite", "train"):
        assert found.seconds[part] > 0, part
    assert found.share(*towers) > 0.5
    assert 0 < found.busy_here <= found.busy <= 1
    assert 0 < found.step_secs < 1
    for secs, main_thread_secs in content["python"].values():
        assert 0 < main_thread_secs < secs < 1


@pytest.mark.parametrize("is_staged", [False, True], ids=["fetched in the step", "staged"])
def test_a_slow_input_is_what_a_step_waits_for(is_staged, monkeypatch):
    monkeypatch.setattr(transfer, "are_gpus", lambda devices: is_staged)
    options = BenchmarkOptions(workload="slow_input", dataset="auto", batch_size=8, seconds=0.2, device="cpu")
    found, _, _ = breakdown.measure(options, 1)
    assert found.seconds["input wait"] > 0.5 * slow_input.SECONDS
    assert found.step_secs > 0.9 * slow_input.SECONDS
    assert found.in_place_secs < 0.5 * slow_input.SECONDS
