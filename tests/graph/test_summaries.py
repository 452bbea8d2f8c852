"""TensorBoard's curves: one set of curves, whose tags are the same for any number of towers."""

import numpy as np
import pytest
import tensorflow as tf
import trainings
import values

from tower_train.graph import summaries
from tower_train.workload import Examples, Workload, softmax_cross_entropy

v1 = tf.compat.v1


def inference(images, training):
    """Summarises and shows layers as a user's network may."""
    flat = tf.reshape(images, [-1, 12])
    hidden = tf.nn.relu(flat @ v1.get_variable("hidden/weights", [12, 4]))
    with v1.name_scope("hidden/relu/relu"):  # the tag is hidden/relu, which has no name twice
        v1.summary.histogram("activations", hidden)
        v1.summary.scalar("sparsity", tf.nn.zero_fraction(hidden))
    v1.summary.scalar("largest", tf.reduce_max(hidden))
    v1.summary.histogram("hidden/values", hidden)
    return hidden @ v1.get_variable("output/weights", [4, 3]) * v1.get_variable("scale", [], tf.float32)


def loss(logits, labels):
    cross_entropy = softmax_cross_entropy(logits, labels)
    v1.summary.scalar("own_loss", cross_entropy)
    return cross_entropy


def test_the_tags_are_these_and_name_no_tower_and_variables_are_those_after_the_update():
    rng = np.random.default_rng(0)
    examples = Examples.from_arrays("random", rng.normal(size=[8, 2, 2, 3]), rng.integers(0, 3, 8))
    options = dict(num_gpus=2, batch_size=4, summary_every_steps=1)
    with trainings.opened(Workload("toy", None, inference, loss), examples, **options) as (built, session):
        serialized = session.run([built.summary, built.report])[0]
        weights = session.run({variable.op.name: variable for variable in v1.trainable_variables()})
    shown = v1.Summary.FromString(serialized).value
    scalars = {"hidden/relu/sparsity", "largest", "own_loss"}
    histograms = {"hidden/relu/activations", "hidden/values"}
    for name in ("hidden/weights", "output/weights", "scale"):
        histograms |= {name, f"{name}/gradients"}
    expected = scalars | histograms | {f"images/image/{i}" for i in range(4)}
    assert sorted(value.tag for value in shown) == sorted(expected)
    assert {value.tag for value in shown if value.HasField("simple_value")} == scalars
    histos = {value.tag: value.histo for value in shown if value.HasField("histo")}
    assert histos.keys() == histograms
    for name, value in weights.items():
        assert histos[name].num == value.size
        assert histos[name].sum == pytest.approx(np.sum(value, dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("channels", [1, 10, 255])
def test_a_sample_is_of_all_channels_alike(channels):
    count = 3 * 2**16 // channels
    sample = values.of(summaries.sample, np.tile(np.arange(channels, dtype=np.float32), [count, 1]))
    assert 2**15 < sample.size <= 2**16
    of_each = np.bincount(sample.astype(int), minlength=channels)
    assert of_each.max() - of_each.min() <= 1
