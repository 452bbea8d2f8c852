"""Random numbers: each example's own in keras_network, rows of one device's elsewhere, whatever the towers."""

import keras
import numpy as np
import tensorflow as tf
import trainings
from keras_workload import SIZE, drawing, images, train

import tower_train

v1 = tf.compat.v1


class Unseeded(keras.layers.Layer):
    """Adds numbers of Keras' global generator."""

    def call(self, inputs, training=None):
        numbers = keras.random.randint([keras.ops.shape(inputs)[0], 1, 1, 1], -3, 4)
        return inputs + keras.ops.cast(numbers, inputs.dtype) if training else inputs


def masks_of(build, steps=1, **options):
    """float64 [outputs, global batch, SIZE, SIZE, 2] of each step: what a network without weights makes of ones."""
    ones = tower_train.Examples.from_arrays("ones", np.ones([24, SIZE, SIZE, 2], np.float32), np.zeros(24, int), ["a"])
    network = tower_train.keras_network(build)
    seen = []

    def inference(features, training):
        v1.get_variable("weight", [], features.dtype)
        seen.append(tf.stack(tf.nest.flatten(network(features, training))))
        return seen[-1]

    def loss(outputs, labels):
        with v1.variable_scope("", reuse=True):
            return tf.reduce_mean(outputs) * v1.get_variable("weight", [], outputs.dtype)

    with trainings.opened(tower_train.Workload("ones", None, inference, loss), ones, dtype="float64", **options) as (
        built,
        session,
    ):
        return np.array([np.concatenate(session.run([seen, built.report])[0], axis=1) for _ in range(steps)])


def each_alone(*layers):
    def make():
        inputs = keras.Input([SIZE, SIZE, 2])
        return keras.Model(inputs, [layer()(inputs) for layer in layers])

    return make


EACH = {
    "dropout": lambda: keras.layers.Dropout(0.5),
    "depth": lambda: keras.layers.Dropout(0.5, noise_shape=(None, 1, 1, 1)),
    "spatial": lambda: keras.layers.SpatialDropout2D(0.5),
    "noise": lambda: keras.layers.GaussianNoise(1.0),
    "factors": lambda: keras.layers.GaussianDropout(0.5),
    "alpha": lambda: keras.layers.AlphaDropout(0.5),
    "brightness": lambda: keras.layers.RandomBrightness(0.1, value_range=(-9, 9)),
    "unseeded": Unseeded,
}


def test_each_example_has_numbers_of_its_own_that_no_cut_changes():
    one, two = (
        masks_of(each_alone(*EACH.values()), steps=2, batch_size=8 // towers, num_gpus=towers) for towers in (1, 2)
    )
    for i, name in enumerate(EACH):
        np.testing.assert_array_equal(two[:, i], one[:, i], err_msg=name)
        least = {"depth": 2, "spatial": 3, "unseeded": 3}.get(name, 14)  # of 16: those draw few numbers, some alike
        assert len({mask.tobytes() for mask in np.concatenate(one[:, i])}) >= least, name


def test_a_draw_of_no_example_is_one_for_all_towers():
    make = each_alone(lambda: keras.layers.Dropout(0.5, noise_shape=(1, None, None, None)))
    [one] = masks_of(make, steps=2, batch_size=8).swapaxes(0, 1)
    np.testing.assert_array_equal(masks_of(make, steps=2, batch_size=4, num_gpus=2)[:, 0], one)
    assert (one[0] == one[0][:1]).all() and (one[0][0] != one[1][0]).any()
    assert (masks_of(make, batch_size=8, seed=1)[0, 0] != one[0]).any()


def test_towers_that_drop_match_one_tower():
    examples = images()
    recurrent = [
        lambda: keras.layers.Reshape([2, 36]),
        lambda: keras.layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2),
    ]
    make = drawing(keras.layers.RandomFlip, lambda: keras.layers.Dropout(0.3), *recurrent)
    cut = dict(num_gpus=2, batch_size=2, accumulate_steps=2, variable_update="mirrored")
    trainings.assert_same(train(examples, make, 2, **cut), train(examples, make, 2))
