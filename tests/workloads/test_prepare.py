"""An exported network prepares in its graph, to the bit, what evaluation prepares in the input pipeline."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import augment, crops
from tower_train.workloads import fashion_mnist

v1 = tf.compat.v1


@pytest.mark.parametrize("prepare", [augment.prepare, crops.prepare, fashion_mnist.WORKLOAD.prepare])
def test_the_pipeline_and_the_graph_prepare_the_same_bits(prepare):
    images = np.random.default_rng(0).integers(0, 256, [64, 32, 32, 3]).astype(np.uint8)
    images[0] = 7
    with tf.Graph().as_default(), v1.Session() as session:
        dataset = tf.data.Dataset.from_tensors(images).map(prepare)
        in_pipeline = v1.data.make_one_shot_iterator(dataset).get_next()
        in_graph = prepare(v1.placeholder_with_default(images, [None, 32, 32, 3]))
        one, other = session.run([in_pipeline, in_graph])
    assert one.tobytes() == other.tobytes()
