"""Towers that XLA compiles train what others train, to rounding: --jit_compile=always against never, in float64."""

import collections
import dataclasses

import norm_workload
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import layers
from tower_train.graph import xla
from tower_train.workload import DataRequest

v1 = tf.compat.v1
EXAMPLES = toy_workload.load(DataRequest("train"))


CASES = {
    "accumulated": (
        lambda features, training: layers.dropout(toy_workload.network(features, training), 0.2, training),
        dict(
            num_gpus=1,
            accumulate_steps=2,
            optimizer="muon",
            nesterov=True,
            clip_gradients=0.5,
            class_weight="balanced",
            ema=0.9,
        ),
    ),
    "mirrored": (
        norm_workload.network,
        dict(num_gpus=2, variable_update="mirrored", optimizer="momentum", label_smoothing=0.1),
    ),
}


def find_workload(network):
    return dataclasses.replace(toy_workload.WORKLOAD, inference=network)


def clusters(built, session):
    """{device: clusters that a step runs there}"""
    metadata = v1.RunMetadata()
    session.run(built.report, options=v1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    return collections.Counter(
        node.device.rpartition(":")[2]
        for graph in metadata.partition_graphs
        for node in graph.node
        if node.op in ("XlaLaunch", "_XlaRun")
    )


@pytest.mark.parametrize(("network", "options"), CASES.values(), ids=CASES)
def test_compiled_towers_train_what_others_train(network, options):
    def train(jit_compile):
        common = dict(dtype="float64", learning_rate=0.05, batch_size=6, jit_compile=jit_compile)
        with trainings.opened(find_workload(network), EXAMPLES, **common, **options) as (built, session):
            losses = [float(session.run(built.report).loss) for _ in range(3)]
            return (losses, trainings.snapshot(built, session)), clusters(built, session)

    (plain, none), (compiled, found) = train("never"), train("always")
    trainings.assert_same(compiled, plain)
    assert not none and found.keys() == {str(i) for i in range(options["num_gpus"])}


@pytest.mark.parametrize(
    ("window", "stride", "padding"), [(2, 2, "VALID"), (3, 2, "SAME"), (3, 1, "VALID"), (2, 3, "SAME")]
)
def test_a_poolings_gradient_goes_to_the_first_of_equal_values(window, stride, padding):
    rng = np.random.default_rng(0)
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        maps = v1.placeholder(tf.float64, [None, None, None, 2])

        def gradient():
            pooled = tf.nn.max_pool2d(maps, window, stride, padding)
            return v1.gradients(pooled * tf.cumsum(tf.cumsum(tf.ones_like(pooled), 1), 2), maps)[0]

        theirs = gradient()
        with xla.compiled(True, "/cpu:0"):
            ours = gradient()
        with v1.Session() as session:
            found, wanted = session.run([ours, theirs], {maps: rng.integers(0, 3, [2, 9, 8, 2])})
    np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_the_optimizers_that_would_split_clusters_are_off_only_where_towers_are_compiled():
    for count, folds in ((1, True), (2, False)):  # several logical CPUs: see leave_to_xla
        config = v1.ConfigProto(device_count={"CPU": count})
        xla.leave_to_xla(config)
        rewrites = config.graph_options.rewrite_options
        assert rewrites.remapping == rewrites.OFF and (rewrites.constant_folding == rewrites.OFF) == folds
    config = v1.ConfigProto()
    xla.leave_to_xla(config)
    assert not config.device_count, "a count of 0 would leave no CPU"


def test_a_step_that_is_not_finite_changes_nothing_where_it_is_compiled():
    workload = find_workload(lambda features, training: toy_workload.network(features, training) * np.inf)
    with trainings.opened(workload, EXAMPLES, jit_compile="always", batch_size=6) as (built, session):
        before = trainings.snapshot(built, session)
        report = session.run(built.report)
        after = trainings.snapshot(built, session)
    assert not report.finite.all()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
