"""The toy workload with a layer that has two algorithms: tripling as a product and as a sum."""

import dataclasses

import tensorflow as tf
import toy_workload

from tower_train import layers

built = []  # the algorithm of each tower that was trained, in turn


def thrice(features):
    """Notes which algorithm it takes."""

    def noted(name, function):
        def algorithm(x):
            built.append(name)
            return function(x)

        return algorithm

    ways = {"product": noted("product", lambda x: 3 * x), "sum": noted("sum", lambda x: tf.add_n([x, x, x]))}
    trial = layers.Trial(((8, 4),), features.dtype, (True,))
    return layers.fastest("thrice:4", ways, features, trial=trial)


def inference(features, training):
    return toy_workload.network(thrice(features) if training else 3 * features, training)


WORKLOAD = dataclasses.replace(toy_workload.WORKLOAD, inference=inference)
