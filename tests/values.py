"""Values of tensors, in a graph and a session of their own."""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def of(function, *arrays):
    """Returns the value of function(tensors of these arrays)."""
    with tf.Graph().as_default(), v1.Session() as session:
        return session.run(function(*(tf.nest.map_structure(tf.constant, array) for array in arrays)))


def fetched(examples, indices):
    """Returns (features, labels) of some examples as the stream fetches them, in the map of a dataset."""
    with tf.Graph().as_default(), v1.Session() as session:
        dataset = tf.data.Dataset.from_tensors(np.asarray(indices, np.int64)).map(examples.open())
        iterator = v1.data.make_initializable_iterator(dataset)
        session.run(iterator.initializer)
        return session.run(iterator.get_next())
