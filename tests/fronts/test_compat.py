"""The private names of Keras and TensorFlow exist and mean what fronts/compat.py takes them for.

Those of float64 and of batches are held by test_check.py, the seed and first epoch by
test_multi_worker_models.py.
"""

import pathlib
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.training import training as training_module

import tower_train
from tower_train.fronts import compat
from tower_train.fronts.tf_estimator import library

v1 = tf.compat.v1
PRIVATE = re.compile(
    r"(?<!self)(?<!cls)\._(?!_|replace\b|asdict\b|exit\b|current_frames\b)\w+"
    r"|keras\.src|__internal__|tensorflow\.python"
)


OF_LIBRARY = {"estimator.py"} | {
    f"fronts/tf_estimator/{name}.py" for name in ("inputs", "library", "proof", "tower_estimator", "workers")
}
BELOW = {  # modules under the room that touch a private name, and where that is tested
    "bench/breakdown.py": "tests/bench/test_breakdown.py",
    "graph/devices.py": "tests/gpus",
    "graph/optimizers.py": "tests/graph/test_arithmetic.py",
    "graph/shortages.py": "tests/graph/test_shortages.py",
    "graph/stream.py": "tests/graph/test_chosen_kernels.py",
    "graph/update.py": "tests/graph/test_loss_scale.py",
    "graph/variables.py": "tests/proof/test_programs.py",
    "inference/curves.py": "tests/inference/test_curves.py",
    "proof/normalization.py": "tests/proof",
    "proof/operations.py": "tests/proof",
}


def test_no_other_module_touches_a_private_name():
    package = pathlib.Path(tower_train.__file__).parent
    touched = {str(path.relative_to(package)) for path in package.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert touched == {"fronts/compat.py", *OF_LIBRARY, *BELOW}


class Owner:
    @staticmethod
    def static():
        return "static"

    def method(self):
        return "method"


class Heir(Owner):
    pass


def test_replaced_of_a_class_its_heirs_and_one_object_even_after_an_error():
    with compat.replaced(Owner, "static", staticmethod(lambda: "other")):
        assert Owner.static() == Heir().static() == "other"
    assert Owner.static() == Owner().static() == "static"
    with compat.replaced(Heir, "method", lambda self: "heir"):
        assert (Heir().method(), Owner().method()) == ("heir", "method")
    one, other = Owner(), Heir()
    one.value = 1
    with pytest.raises(KeyError), compat.replaced(one, "method", lambda: 2), compat.replaced(one, "value", 3):
        assert (one.method(), one.value, other.method()) == (2, 3, "method")
        raise KeyError
    assert (one.method(), one.value, vars(Heir).get("method")) == ("method", 1, None)


def test_fresh_layer_names_begin_at_0_in_this_thread_and_go_on_afterwards():
    def name():
        return keras.layers.Dense(1).name

    name()
    before, others = int(name().rpartition("_")[2]), []
    with compat.fresh_layer_names():
        assert (name(), name()) == ("dense", "dense_1")
        thread = threading.Thread(target=lambda: others.extend([name(), name()]))
        thread.start()
        thread.join()
    assert name() == f"dense_{before + 1}" and others == ["dense", "dense_1"]


def test_intercepted_assignments_are_all_that_keras_does():
    seen = []

    def assign(original, variable, value):
        seen.append(variable.name)
        original(variable, value + 1)

    variable = keras.Variable([1.0, 2.0], name="mine")
    layer = keras.layers.BatchNormalization(name="norm")
    layer.build([None, 2])
    with compat.intercepted_assignments(assign):
        variable.assign([3.0, 4.0] * tf.ones([2]))
        variable.assign_add(tf.ones([2]))
        layer(tf.ones([2, 2]), training=True)
    assert seen == ["mine", "mine", "moving_mean", "moving_variance"]
    np.testing.assert_array_equal(variable.numpy(), [4 + 1 + 1, 5 + 1 + 1])
    variable.assign([0.0, 0.0])
    np.testing.assert_array_equal(variable.numpy(), [0, 0])


def test_a_variable_without_a_value_has_its_initializer_pending():
    with keras.StatelessScope(initialize_variables=False):
        dense = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(7))
        dense.build([None, 2])
    np.testing.assert_array_equal(compat.pending_initializer(dense.kernel)([2, 3]), np.full([2, 3], 7))
    assert compat.pending_initializer(keras.Variable(1.0)) is None


def test_set_storage_makes_a_variable_read_and_write_another():
    variable, storage = keras.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    before = variable.value
    compat.set_storage(variable, storage)
    variable.assign([5.0, 6.0])
    np.testing.assert_array_equal(storage, [5, 6])
    np.testing.assert_array_equal(before, [1, 2])
    compat.set_storage(variable, np.array([7.0, 8.0], np.float32))
    np.testing.assert_array_equal(variable.numpy(), [7, 8])
    np.testing.assert_array_equal(storage, [5, 6])


def test_seed_states_are_those_of_layers_that_draw_random_numbers():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    model(tf.ones([1, 4]), training=True)
    [state] = [variable for variable in model.variables if compat.is_seed_state(variable)]
    before = state.numpy()
    model(tf.ones([1, 4]), training=True)
    assert before.shape == (2,) and list(state.numpy() - before) == [0, 1]  # the second one counts the draws


def test_sublayers_are_those_of_nested_models_and_of_layers_too():
    inputs = keras.Input([4])
    inner = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, name="nested")], name="inner")
    both = keras.layers.Bidirectional(keras.layers.LSTM(2, name="lstm"), name="both")
    model = keras.Model(inputs, both(keras.layers.Reshape([3, 1])(inner(inputs))))
    names = [layer.name for layer in compat.sublayers(model)]
    assert set(names) > {"inner", "nested", "both", "forward_lstm", "backward_lstm"}
    assert model.name not in names


def test_losses_and_metrics_are_built_in_no_graph_and_draw_nothing():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=["mae"])
    assert [variable.path for variable in model.metrics_variables if "mae" in variable.path] == []
    before = [weight.numpy() for weight in model.weights]
    with tf.Graph().as_default() as graph:
        x, y = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, [None, 1])
        compat.build_losses_and_metrics(model, x, y)
        assert {op.type for op in graph.get_operations()} == {"Placeholder"}
    assert any("mae" in variable.path or "mean_absolute" in variable.path for variable in model.metrics_variables)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


def test_metrics_of_a_model_are_those_of_all_its_layers_and_not_those_of_compile():
    class Measures(keras.layers.Layer):
        def __init__(self, name):
            super().__init__()
            self.metric = keras.metrics.Mean(name=name)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.own = keras.metrics.Mean(name="own")
            self.inner = keras.Sequential([keras.Input([2]), Measures("nested")])

    model = Model()
    model.compile(loss="mse", metrics=["mae"])
    assert [metric.name for metric in compat.own_metrics(model)] == ["own"]
    assert [metric.name for metric in compat.layer_metrics(model)] == ["own", "nested"]


def test_draws_of_keras_and_tensorflow_are_done_by_another_function():
    tf.random.set_seed(1)  # without one, draws have no seeds at all
    seen, seeds = [], keras.random.SeedGenerator(1)

    def draw(function, given):
        seen.append((function.__name__, given["seed"], given.get("seed2"), given.get("dtype")))
        return 2 * function(**given)

    expected = [keras.random.uniform([2], seed=3), keras.random.dropout(tf.ones([9]), 0.5, seed=3)]
    with compat.drawn_by(draw):
        found = [keras.random.uniform([2], seed=3), keras.random.dropout(tf.ones([9]), 0.5, seed=3)]
        keras.layers.GaussianNoise(1.0)(tf.ones([1, 2]), training=True)
        keras.random.randint([2], 0, 9, seed=seeds)
        with compat.unseeded_marked():
            tf.random.normal([2]), tf.random.uniform([2], seed=5), tf.random.truncated_normal([2], seed=0)
            tf.random.uniform([2], 0, 9, tf.int32)
    for doubled, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(doubled, 2 * one)
    names, of_keras, of_ops, dtypes = zip(*seen, strict=True)
    assert names[:4] == ("uniform", "dropout", "normal", "randint") and dtypes[3] == "int32"
    assert of_keras[:2] == (3, 3) and of_keras[3] is seeds and of_keras[2].state.shape == (2,)
    assert set(names[4:]) == set(compat.DRAWS_OF_TENSORFLOW.values())
    assert [isinstance(seed, compat.NoSeed) for seed in of_ops[4:]] == [True, False, False, True]


def test_draws_that_are_skipped_are_those_of_earlier_ones():
    with tf.Graph().as_default():
        tf.random.set_seed(1)
        seeds = [v1.get_seed(None) for _ in range(3)]
    with tf.Graph().as_default():
        tf.random.set_seed(1)
        compat.skip_draws(2)
        assert v1.get_seed(None) == seeds[2] != seeds[0]


def test_image_layers_take_pythons_numbers_as_floatx(float64):
    with tf.Graph().as_default(), compat.python_floats():  # outside of it RandomRotation multiplies by a float32
        images = tf.ones([2, 8, 8, 3], tf.float64)
        assert keras.layers.RandomRotation(0.1, dtype="float64")(images, training=True).dtype == tf.float64


def test_a_session_is_opened_by_another_function_and_a_stop_withdrawn():
    with compat.replaced(training_module, "MonitoredTrainingSession", dict):
        assert library.estimator.training.MonitoredTrainingSession(master="a") == {"master": "a"}
    context = v1.train.SessionRunContext(None, None)
    context.request_stop()
    context._stop_requested = False
    assert not context.stop_requested


def test_savers_refuse_a_value_of_another_shape(tmp_path):
    for shape in ([2], [3]):
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.get_variable("v", shape, initializer=v1.zeros_initializer())
            if shape == [2]:
                session.run(variable.initializer)
                path = v1.train.Saver().save(session, str(tmp_path / "saved"))
                v1.train.Saver().restore(session, path)
                continue
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\] is not compatible .* \[3\]"):
                v1.train.Saver().restore(session, path)


def test_masks_and_logits_go_from_layers_to_losses():
    embedded = keras.layers.Embedding(3, 1, mask_zero=True)(np.array([[1, 0]]))
    np.testing.assert_array_equal(compat.attached(embedded)["_keras_mask"], [[True, False]])
    assert compat.attached(tf.ones([1])) == {}
    outputs = tf.constant([[[1.0], [100.0]]])
    compat.attach(outputs, {"_keras_mask": tf.constant([[True, False]])})
    assert float(keras.losses.MeanSquaredError()(tf.zeros([1, 2, 1]), outputs)) == pytest.approx(1)
    for name in ("softmax", "sigmoid"):
        logits = tf.constant([[1.0, 2.0]])
        np.testing.assert_array_equal(compat.attached(keras.layers.Activation(name)(logits))["_keras_logits"], logits)
    saturated = tf.constant([[1.0, 0.0]])
    compat.attach(saturated, {"_keras_logits": tf.constant([[200.0, 0.0]])})
    loss = keras.losses.SparseCategoricalCrossentropy()(np.array([1]), saturated)
    assert float(loss) == pytest.approx(200)


def test_added_losses_survive_the_next_call_of_the_model():
    model = keras.Sequential([keras.Input([2]), keras.layers.ActivityRegularization(l2=1.0)])
    scopes, kept = [keras.StatelessScope(collect_losses=True) for _ in range(2)], ({}, {})
    for scope, of_scope in zip(scopes, kept, strict=True):
        compat.take_losses(model, of_scope)
        with scope:
            model(tf.ones([1, 2]))
    with scopes[0]:
        assert model.losses == []
        compat.take_losses(model, kept[0])
        assert [float(loss) for loss in model.losses] == [2.0]


def test_the_loss_of_fit_and_its_metric():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return x + y + y_pred + sample_weight

    model = keras.Sequential([keras.Input([1])])
    model.compile(loss="mse")
    x = tf.ones([2, 1])
    assert float(compat.compute_loss(model, None, 3 * x, x, None, training=True)) == 4
    assert compat.loss_tracker(model).name == "loss" and not compat.is_overridden(model, "compute_loss")
    own = Own()
    own.compile()
    assert compat.compute_loss(own, 1, 2, 3, 4, training=True) == 10 and compat.is_overridden(own, "compute_loss")


def test_an_op_gets_another_input_and_waits_for_a_later_one():
    with tf.Graph().as_default(), v1.Session() as session:
        counter = v1.get_variable("counter", [], initializer=v1.zeros_initializer())
        total = tf.constant(1.0) + tf.constant(2.0)
        compat.set_input(total.op, 1, tf.constant(5.0))
        compat.add_control_input(total.op, counter.assign_add(1.0).op)
        session.run(v1.global_variables_initializer())
        assert (session.run(total), session.run(counter)) == (6, 1)
