"""Values of tensors, in a graph and a session of their own; given numbers for random changes to examples."""

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


class GivenDraws:
    """Implements workload.Draws by given numbers [batch, count]: for any name, or {name: numbers} of `uniform`."""

    def __init__(self, uniform, per_example=None, epochs=None):
        self._uniform, self._per_example = uniform, per_example
        self.epochs = None if epochs is None else tf.constant(epochs, tf.int64)

    def uniform(self, name, count):
        given = self._uniform[name] if isinstance(self._uniform, dict) else self._uniform
        return tf.convert_to_tensor(given, tf.float32)[:, :count]

    def per_example(self, name, count):
        return tf.convert_to_tensor(self._per_example, tf.float32)[:, :count]
