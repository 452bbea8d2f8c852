"""The private names of Keras and TensorFlow: those that no test of a front holds, and the modules that touch others."""

import concurrent.futures
import pathlib
import re

import keras
import pytest
import tensorflow as tf

import tower_train
from tower_train.fronts import compat, meeting

v1 = tf.compat.v1
PRIVATE = re.compile(
    r"(?<!self)(?<!cls)\._(?!_|replace\b|asdict\b|exit\b|current_frames\b)\w+"
    r"|keras\.src|__internal__|tensorflow\.python"
)


OF_LIBRARY = {"estimator.py"} | {
    f"fronts/tf_estimator/{name}.py" for name in ("inputs", "library", "proof", "tower_estimator", "workers")
}
OF_TF1 = {f"fronts/tf1/{name}.py" for name in ("keras_models", "names", "views")}  # old names today: tests/tf1
BELOW = {  # modules under the package that touch a private name, and where that is tested
    "bench/breakdown.py": "tests/bench/test_breakdown.py",
    "graph/devices.py": "tests/gpus",
    "graph/gradients.py": "tests/run/test_steps.py",
    "graph/towers.py": "tests/graph",
    "graph/stream.py": "tests/graph/test_chosen_kernels.py",
    "graph/update.py": "tests/graph/test_loss_scale.py",
    "graph/variables.py": "tests/proof/test_programs.py",
    "graph/xla.py": "tests/graph/test_compiled.py",
    "inference/curves.py": "tests/inference/test_curves.py",
    "normalization.py": "tests/graph/test_batch_normalization.py",
    "proof/operations.py": "tests/proof",
}


def test_no_other_module_touches_a_private_name():
    package = pathlib.Path(tower_train.__file__).parent
    touched = {str(path.relative_to(package)) for path in package.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert touched == {"fronts/compat.py", *OF_LIBRARY, *OF_TF1, *BELOW}


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


def test_image_layers_take_pythons_numbers_as_floatx():
    with tf.Graph().as_default(), compat.floatx("float64"):  # outside of it RandomRotation multiplies by a float32
        images = tf.ones([2, 8, 8, 3], tf.float64)
        assert keras.layers.RandomRotation(0.1, dtype="float64")(images, training=True).dtype == tf.float64


def test_a_saver_that_reshapes_takes_a_value_of_another_shape(tmp_path):
    for shape in ([6], [2, 3]):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.get_variable("v", shape, initializer=v1.ones_initializer())
            if shape == [6]:
                session.run(v1.global_variables_initializer())
                path = v1.train.Saver().save(session, str(tmp_path / "saved"))
            v1.train.Saver(reshape=True).restore(session, path)


def test_what_is_replaced_for_one_thread_is_so_for_its_towers_and_for_no_other():
    def told(original, owner):
        return f"not {original(owner)}"

    with compat.replaced_here(Owner, method=told), compat.replaced_here(Owner, method=told):
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            assert executor.submit(Owner().method).result() == "method"
        with tf.Graph().as_default():
            assert meeting.Towers(["/cpu:0"] * 2).run(lambda tower: Heir().method()) == ["not not method"] * 2
    assert Owner().method() == "method"


def test_a_method_is_wrapped_in_all_heirs_of_a_class():
    class Base:
        def method(self):
            return "base"

    class Of(Base):
        def method(self):
            return f"of {super().method()}"

    compat.wrap_method(Base, "method", lambda method: lambda self: f"({method(self)})")

    class Later(Of):
        def method(self):
            return "later"

    class Silent(Later):
        pass

    assert [cls().method() for cls in (Base, Of, Silent)] == ["(base)", "(of (base))", "(later)"]


def test_tracing_that_is_not_counted_gives_no_warning_later(monkeypatch):
    warned = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *args: warned.append(args))
    function = tf.function(lambda x: x)  # traced anew for each number of Python's
    with compat.tracing_not_counted():
        list(map(function, range(9)))
    function(9)
    assert not warned
    list(map(function, range(10, 19)))
    assert warned
