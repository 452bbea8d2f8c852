"""The private names of Keras and TensorFlow: those that no test of a front holds, and the modules that touch others."""

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


def test_a_saver_that_reshapes_takes_a_value_of_another_shape(tmp_path):
    for shape in ([6], [2, 3]):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.get_variable("v", shape, initializer=v1.ones_initializer())
            if shape == [6]:
                session.run(v1.global_variables_initializer())
                path = v1.train.Saver().save(session, str(tmp_path / "saved"))
            v1.train.Saver(reshape=True).restore(session, path)


def test_an_op_waits_for_a_later_one():
    with tf.Graph().as_default(), v1.Session() as session:
        counter = v1.get_variable("counter", [], initializer=v1.zeros_initializer())
        total = tf.constant(1.0) + tf.constant(2.0)
        compat.add_control_input(total.op, counter.assign_add(1.0).op)
        session.run(v1.global_variables_initializer())
        assert (session.run(total), session.run(counter)) == (3, 1)
