"""multi_gpu_model trains what Keras' own fit trains on one device, whatever the model, the data and the towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_examples import EXAMPLES
from keras_twins import CROSS_ENTROPY, Adds, assert_same, data, fit_both, small_network, twins
from tensorflow.python.eager import context

import tower_train

layers, ops = keras.layers, keras.ops


def test_on_py_datasets_with_a_batch_of_nothing_and_several_steps_per_execution(float64):
    x, y = data(10, 6, 6, 2)
    loss = {"optimizer": "sgd", "loss": CROSS_ENTROPY, "steps_per_execution": 2}
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    assert_same(fit_both(small_network, 3, loss, Batches(), is_eager=False), 1e-9)


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
        dropped = self.dropout(ops.reshape(x, [-1, x.shape[2]]), training=training)
        return ops.reshape(dropped, [-1, *x.shape[1:]])


def test_dropout_noise_and_augmentation_are_those_of_one_device(float64):
    def build():
        return keras.Sequential(
            [
                keras.Input([3, 4]),
                layers.Reshape([3, 4, 1]),
                layers.RandomFlip("horizontal", seed=1),
                layers.Reshape([3, 4]),
                layers.GaussianNoise(0.1, seed=4),
                layers.SpatialDropout1D(0.3, seed=5),
                DropsElements(),
                layers.SimpleRNN(3, dropout=0.2, recurrent_dropout=0.2, seed=6),
                layers.Dropout(0.5, seed=3),
                layers.Dense(2, activity_regularizer="l2"),
            ]
        )

    x, y = data(7, 3, 4)[0], data(7, 2)[0]
    assert_same(fit_both(build, 2, {"optimizer": "adam", "loss": "mse"}, x, y, batch_size=4), 1e-12)


def test_batch_normalisation_averages_by_tower_move_to_the_mean_over_examples():
    model = keras.Sequential([keras.Input([2]), layers.BatchNormalization(momentum=0.9)])
    parallel = tower_train.multi_gpu_model(model, gpus=3, batch_norm="tower")
    parallel.compile("sgd", "mse")
    x, _ = data(5, 2)
    parallel.train_on_batch(x, x)
    parts = [part for part in np.array_split(x, 3) if len(part)]
    of_tower = np.array([len(part) / 5 for part in parts])
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
    settings = {"loss": CROSS_ENTROPY}
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


class Measures(layers.Layer):
    def __init__(self, function, metric):
        super().__init__()
        self.function, self.measured = function, metric

    def call(self, inputs):
        self.measured.update_state(self.function(inputs))
        return inputs


class MeasuringModel(Measures, keras.Model):
    """Measures, but not in the history of a model around it."""


def network(middle=list):
    """Builds a network with the layers that `middle` makes between its two dense ones."""
    return lambda: keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh"), *middle(), layers.Dense(3)])


ADDED = [lambda x: ops.mean(x**2) / 9, lambda x: [ops.mean(x**2), ops.mean(ops.abs(x))], lambda x: 0 * ops.mean(x) + 7]
OF_ACTIVITIES = ["l2", lambda y: 0.01 * ops.sum(y) * ops.shape(y)[1]]
MEASURED = {"vector": lambda x: ops.sum(x**2, axis=-1), "largest": lambda x: ops.max(x, axis=1)}


def test_added_losses_regularizers_and_metrics_of_layers_are_those_of_the_whole_batch(float64):
    """In 6 steps, of which every third has a batch that towers can share out evenly."""

    def middle():
        of_weights = {"kernel_regularizer": "l2", "bias_regularizer": "l1"}
        return [
            *(Adds(function) for function in ADDED),
            *(layers.Dense(5, activity_regularizer=each, **of_weights) for each in OF_ACTIVITIES),
            *(Measures(function, keras.metrics.Mean(name=name)) for name, function in MEASURED.items()),
            MeasuringModel(ops.square, keras.metrics.Sum()),
        ]

    settings = {"optimizer": "sgd", "loss": CROSS_ENTROPY}
    trained = fit_both(network(middle), 3, settings, *data(11, 4), batch_size=4, epochs=2)
    assert_same(trained, 1e-12)
    ours, keras_own = (float(model.layers[-2].measured.result()) for model, _ in trained[::-1])
    assert ours == pytest.approx(keras_own, rel=1e-12)
    assert {*MEASURED} <= trained[1][1].history.keys()


def test_added_losses_may_be_all(float64):
    build = network(lambda: [Adds(ADDED[0])])
    assert_same(fit_both(build, 2, {"optimizer": "sgd"}, data(7, 4)[0], batch_size=4), 1e-12)


def test_nested_outputs_with_weights_of_losses_and_samples_and_metrics_by_name(float64):
    def build():
        inputs = keras.Input([4])
        a, b, c = (layers.Dense(n, name=name)(inputs) for n, name in [(1, "a"), (3, "b"), (2, "c")])
        return keras.Model(inputs, {"p": {"a": a}, "q": [b, c]})

    def like(a, b, c):
        return {"p": {"a": a}, "q": [b, c]}

    settings = {
        "loss": like("mse", CROSS_ENTROPY, "mse"),
        "loss_weights": like(0.1, 2.0, 1.0),
        "metrics": like(["mae"], ["accuracy"], ["mae"]),
        "weighted_metrics": like(["mae"], [], []),
    }
    x, of_b = data(10, 4)
    y, weights = like(x[:, :1], of_b, x[:, :2]), like(*(np.abs(x[:, i]) for i in range(3)))
    given = dict(batch_size=5, sample_weight=weights, validation_data=(x, y))
    trained = fit_both(build, 2, settings, x, y, **given)
    assert_same(trained, 1e-12)
    [(_, expected), (_, history)] = trained
    assert list(history.history) == list(expected.history)


def test_a_loss_of_chosen_examples_whose_gradient_is_sparse(float64):
    def of_the_last(y_true, y_pred):
        return CROSS_ENTROPY(y_true[-3:], tf.gather(y_pred, [-3, -2, -1] + tf.shape(y_pred)[0]))

    x, y = data(8, 4)
    assert_same(fit_both(network(), 3, {"optimizer": "sgd", "loss": of_the_last}, x, y, batch_size=8), 1e-12)


def test_crossentropies_of_saturated_outputs_are_computed_of_their_logits(float64):
    """As of pixels that are not scaled: outputs are 0 and 1, and only their logits have gradients."""

    def build():
        hidden = [layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
        return keras.Sequential([keras.Input([6, 6, 2]), layers.Flatten(), *hidden])

    x, y = data(20, 6, 6, 2)
    loss = "sparse_categorical_crossentropy"
    settings = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy", loss]}
    assert_same(fit_both(build, 2, settings, 255 * np.abs(x), y, batch_size=16), 1e-9)


# Two workers train the others in test_multi_worker_models.py.
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not example.on_workers])
def test_two_towers_train_what_keras_does_on_one_device(float64, name):
    example = EXAMPLES[name]
    data = example.data()
    data.setdefault("batch_size", 5)
    assert_same(fit_both(example.build, 2, example.compiled, **data), 1e-9)


def test_an_example_is_exported_as_the_plain_model(tmp_path):
    example = EXAMPLES["preprocessing_layers"]
    x = example.data()["x"]
    parallel = tower_train.multi_gpu_model(example.build(), gpus=2)
    parallel.export(tmp_path / "exported", verbose=False)
    served = keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")
    found = served({name: keras.ops.convert_to_tensor(values) for name, values in x.items()})
    np.testing.assert_allclose(found, parallel.template.predict(x, verbose=0), atol=1e-6)
