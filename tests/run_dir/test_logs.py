"""The curves that TensorBoard draws are those of the run: its tags, steps and values, and no tower's."""

import time

import jobs
import numpy as np
import pytest
import tensorflow as tf

SCOPES = ("conv1", "conv2", "local3", "local4", "softmax_linear")


@pytest.fixture(scope="module")
def cifar10_curves(cifar10_run):
    return jobs.events(cifar10_run[0])


def test_curves_and_metrics_jsonl_tell_the_same(cifar10_run, cifar10_curves):
    for points in (cifar10_curves.Scalars("conv1/sparsity"), cifar10_curves.Histograms("conv1/weights")):
        assert [event.step for event in points] == [6, 12, 18, 24]
    logged = {record["step"]: record for record in jobs.metrics(cifar10_run[0])}
    for tag, name in (("total_loss", "loss"), ("learning_rate", "learning_rate"), ("examples_per_sec",) * 2):
        points = {event.step: event.value for event in cifar10_curves.Scalars(tag)}
        assert list(points) == [4, 8, 12, 16, 20, 24]
        assert points == pytest.approx({step: record[name] for step, record in logged.items()}, rel=1e-6)
    decays = [a.value - b.value for a, b in zip(*map(cifar10_curves.Scalars, ("total_loss", "loss")), strict=True)]
    weights = [jobs.variables(cifar10_run[0], 24)[f"{scope}/weights"] for scope in ("local3", "local4")]
    expected = sum(0.004 * np.sum(np.square(w, dtype=np.float64)) / 2 for w in weights)  # after the last step
    assert decays[-1] == pytest.approx(expected, rel=1e-2)


def test_the_graph_is_drawn_with_a_box_for_each_tower_layer_and_part_of_the_step(cifar10_run, cifar10_curves):
    graph = cifar10_curves.Graph()
    names = {node.name for node in graph.node}
    assert len(names) == len(graph.node) and graph.ByteSize() < 10**6
    towers = {"tower_0", "tower_1"}
    parts = {"input", "learning_rate", "average_gradients", "weight_decay", "check_finite", "report"}
    assert {name.split("/")[0] for name in names} >= {"global_step", "examples_seen"} | towers | parts | set(SCOPES)
    for tower in towers:  # each the same network, and its gradients
        assert {f"{tower}/{scope}" for scope in SCOPES} <= {"/".join(name.split("/")[:2]) for name in names}
    sources = {source.removeprefix("^").split(":")[0] for node in graph.node for source in node.input}
    assert sources <= names, "an edge leads nowhere"
    assert max(node.ByteSize() for node in graph.node) < 4000
    outputs = [node.attr["_output_shapes"].list.shape for node in graph.node if node.name == "tower_1/conv1/conv1"]
    assert [[dimension.size for dimension in shape.dim] for shape in outputs[0]] == [[5, 24, 24, 64]]


def test_a_resume_neither_loses_nor_repeats_a_point(run, monkeypatch):
    """Also not the point of the step it begins at, nor where the clock was set back between two starts."""
    now, now_ns = time.time, time.time_ns
    for hours, max_steps in ((-1, 60), (2, 80), (-300_000, 100)):  # the last to a time that has fewer digits
        monkeypatch.setattr(time, "time", lambda hours=hours: now() + 3600 * hours)
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: now_ns() + 3600 * 10**9 * hours)
        jobs.train_toy(run, max_steps=max_steps, summary_every_steps=10)
    curves = jobs.events(run)
    for name in ("total_loss", "examples_per_sec"):
        assert [event.step for event in curves.Scalars(name)] == list(range(5, 101, 5))
    paths = map(str, run.glob("events.out.*"))
    events = [event for path in paths for event in tf.compat.v1.train.summary_iterator(path)]
    assert sum(bool(event.graph_def) for event in events) == 1
    assert [event.step for event in curves.Histograms("hidden/weights")] == list(range(10, 101, 10))
