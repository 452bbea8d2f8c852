"""multi_gpu_model trains what Keras' own fit trains on one device, whatever the model, the data and the towers."""

import keras
import numpy as np
import tensorflow as tf
from keras_twins import CROSS_ENTROPY, assert_same, data, fit_both, small_network, twins
from tensorflow.python.eager import context

import tower_train

layers = keras.layers


def test_on_datasets_and_py_datasets(float64):
    x, y = data(14, 6, 6, 2)
    loss = {"optimizer": "sgd", "loss": CROSS_ENTROPY, "steps_per_execution": 2}
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 14, 4)]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for source in (dataset, Batches()):
        assert_same(fit_both(small_network, 3, loss, source, is_eager=False), 1e-9)


def test_frozen_layers_stay_and_unused_weights_are_named(capsys):
    def build():
        inputs = keras.Input([4])
        hidden = layers.Dense(4, trainable=False)(inputs)
        return keras.Model(inputs, [layers.Dense(3)(hidden), layers.Dense(2, name="unused")(hidden)])

    x, y = data(8, 4)
    settings = {"optimizer": "adam", "loss": [CROSS_ENTROPY, None]}
    before = twins(build)[0].get_weights()[0]
    trained = fit_both(build, 2, settings, x, [y, y], batch_size=4)
    assert_same(trained, 1e-6)
    np.testing.assert_array_equal(trained[1][0].get_weights()[0], before)
    assert "unused/kernel" in capsys.readouterr().err


class DropsElements(layers.Layer):
    """Drops from [batch * time, features], as BERT does."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3, seed=7)

    def call(self, x, training=False):
        dropped = self.dropout(keras.ops.reshape(x, [-1, x.shape[2]]), training=training)
        return keras.ops.reshape(dropped, [-1, *x.shape[1:]])


def test_dropout_noise_and_augmentation_are_those_of_one_device(float64):
    def build():
        augmentation = [layers.RandomFlip("horizontal", seed=1), layers.RandomContrast(0.2, seed=2)]
        return keras.Sequential(
            [
                keras.Input([5, 4]),
                layers.Reshape([5, 4, 1]),
                *augmentation,
                layers.Reshape([5, 4]),
                layers.GaussianNoise(0.1, seed=4),
                layers.SpatialDropout1D(0.3, seed=5),
                DropsElements(),
                layers.SimpleRNN(3, dropout=0.2, recurrent_dropout=0.2, seed=6),
                layers.Dropout(0.5, seed=3),
                layers.Dense(2, activity_regularizer="l2"),
            ]
        )

    x, y = data(11, 5, 4)[0], data(11, 2)[0]
    assert_same(fit_both(build, 2, {"optimizer": "adam", "loss": "mse"}, x, y, batch_size=4, epochs=4), 1e-12)


def test_batch_normalisation_averages_by_tower_move_to_the_mean_over_examples(examples=5):
    model = keras.Sequential([keras.Input([2]), layers.BatchNormalization(momentum=0.9)])
    parallel = tower_train.multi_gpu_model(model, gpus=3, batch_norm="tower")
    parallel.compile("sgd", "mse")
    x, _ = data(examples, 2)
    parallel.train_on_batch(x, x)
    parts = [part for part in np.array_split(x, 3) if len(part)]
    of_tower = np.array([len(part) / examples for part in parts])
    mean = of_tower @ [part.mean(0) for part in parts]
    variance = of_tower @ [part.var(0) for part in parts]
    gamma, beta, moving_mean, moving_variance = model.get_weights()
    np.testing.assert_allclose(moving_mean, 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(moving_variance, 0.9 + 0.1 * variance, atol=1e-6)


def test_compiled_towers_train_what_others_train(float64):
    """jit_compile=True compiles each tower's passes by XLA, but for what draws random numbers and what towers share."""

    def build():
        hidden = [layers.Dense(4, "tanh"), layers.Dropout(0.3, seed=1)]
        return keras.Sequential([keras.Input([4]), *hidden, layers.Dense(3)])

    x, y = data(8, 4)
    settings = {"loss": CROSS_ENTROPY, "metrics": ["accuracy"]}
    compiled = iter([False, True])  # Keras' own draws other numbers in XLA

    def arguments():
        optimizer = keras.optimizers.AdamW(0.01, amsgrad=True, clipnorm=0.5, use_ema=True)
        return settings | {"optimizer": optimizer, "jit_compile": next(compiled)}

    context.context().enable_graph_collection()
    try:
        trained = fit_both(build, 2, arguments, x, y, batch_size=4)
        graphs = context.context().export_run_metadata().partition_graphs
    finally:
        context.context().disable_graph_collection()
    assert_same(trained, 1e-9)
    nodes = [
        node for graph in graphs for node in [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    ]
    assert {node.op for node in nodes} & {"XlaLaunch", "_XlaRun"}
    model = build()
    parallel = tower_train.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", **settings, jit_compile=True)
    step = tf.function(parallel.train_step).get_concrete_function((tf.zeros([4, 4]), tf.zeros([4], tf.int32)))
    marked = [op for op in step.graph.get_operations() if op.node_def.attr["_XlaCompile"].b]
    products = {op.name.partition("/")[0] for op in marked if op.type == "MatMul"}
    assert products == {"tower_0", "tower_1", "gradient_tape"}
    assert not [op.type for op in marked if "Random" in op.type or "Assign" in op.type]
