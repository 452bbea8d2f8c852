"""A user's part: finding a workload, the metrics and the loss that are there already."""

import numpy as np
import pytest
import tensorflow as tf

import cifar10
from tower_train import workload
from tower_train.errors import ConfigError


def evaluate(build):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(build())


class TestLoad:
    @pytest.fixture
    def modules(self, tmp_path, monkeypatch):
        """A directory of modules to import, as the current directory."""
        (tmp_path / "mine.py").write_text(
            "from tower_train import Workload\n"
            "WORKLOAD = Workload('a', None, None)\n"
            "OTHER = Workload('b', None, None)\n"
        )
        (tmp_path / "empty_one.py").write_text("WORKLOAD = 'no workload'\n")
        (tmp_path / "needs_more.py").write_text("import a_module_nobody_has\n")
        (tmp_path / "broken_one.py").write_text("raise ValueError('of its own')\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("")

    def test_a_module_names_its_workload(self):
        assert workload.load("cifar10") is cifar10.WORKLOAD

    def test_a_module_of_the_current_directory_is_found(self, modules):
        assert workload.load("mine").name == "a"
        assert workload.load("mine:OTHER").name == "b"

    @pytest.mark.parametrize(
        "path", ["no_such", "cifar10.no_such", "no_such.deeper", "", ".", ".cifar10", ":X", "a-b", "a/b.py"]
    )
    def test_a_module_that_is_not_there_is_named(self, path):
        with pytest.raises(ConfigError) as error:
            workload.load(path)
        assert str(error.value).startswith(f"--workload={path}: there is no module ")
        assert "Did you mean" not in str(error.value)

    def test_the_short_name_of_one_that_comes_with_it_is_understood(self, modules):
        with pytest.raises(ConfigError, match="Did you mean tower_train.workloads.fashion_mnist"):
            workload.load("fashion_mnist")

    @pytest.mark.parametrize(
        ("module", "attribute", "missing"),
        [("mine", ":NONE", "NONE"), ("empty_one", "", "WORKLOAD"), ("json", "", "WORKLOAD")],
    )
    def test_a_module_without_that_workload_is_named(self, modules, module, attribute, missing):
        with pytest.raises(ConfigError, match=f"{module} has no tower_train.Workload named {missing}. Define one"):
            workload.load(module + attribute)

    def test_what_a_module_itself_lacks_is_not_hidden(self, modules):
        with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
            workload.load("needs_more")
        with pytest.raises(ValueError, match="of its own"):
            workload.load("broken_one")


def classification_metrics(logits, labels):
    """On fed logits: among constants, which TensorFlow computes beforehand, NaN would not be what it is in a run."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fed = tf.compat.v1.placeholder(logits.dtype, [None, logits.shape[1]])
        return session.run(workload.classification_metrics(fed, tf.constant(labels)), {fed: logits})


class TestClassificationMetrics:
    def test_they_tell_whether_the_right_class_is_the_first_or_among_the_first_five(self):
        rng = np.random.default_rng(0)
        logits, labels = rng.normal(size=[200, 10]), rng.integers(0, 10, 200)
        found = classification_metrics(logits, labels)
        rank = np.argmax(np.argsort(-logits, axis=1) == labels[:, np.newaxis], axis=1)
        assert found.keys() == {"precision @ 1", "precision @ 5"}
        np.testing.assert_array_equal(found["precision @ 1"], rank < 1)
        np.testing.assert_array_equal(found["precision @ 5"], rank < 5)
        assert found["precision @ 1"].dtype == np.float32

    def test_a_nan_counts_as_above_the_right_class(self):
        logits = np.array([[3.0, np.nan, 1.0], [3.0, 2.0, 1.0], [np.nan] * 3])
        np.testing.assert_array_equal(classification_metrics(logits, [0, 0, 0])["precision @ 1"], [0, 1, 0])

    def test_a_tie_counts_against_the_right_class(self):
        found = classification_metrics(np.array([[3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.0]] * 7), np.arange(7))
        np.testing.assert_array_equal(found["precision @ 1"], np.zeros(7))
        np.testing.assert_array_equal(found["precision @ 5"], [1, 1, 1, 1, 0, 0, 0])

    @pytest.mark.parametrize(("classes", "ranks"), [(2, [1]), (5, [1]), (6, [1, 5])])
    def test_the_first_five_are_told_only_where_there_are_more(self, classes, ranks):
        assert list(classification_metrics(np.zeros([1, classes]), [0])) == [f"precision @ {k}" for k in ranks]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_cross_entropy_is_the_mean_negative_log_probability(dtype):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=[50, 4]).astype(dtype), rng.integers(0, 4, 50)
    found = evaluate(lambda: workload.softmax_cross_entropy(tf.constant(logits), tf.constant(labels)))
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    assert found.dtype == dtype
    assert found == pytest.approx(-np.mean(np.log(probabilities[np.arange(50), labels])), rel=1e-6)


class TestLabels:
    LOGITS = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    LABELS = np.array([1, 0])

    @pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "i4", "u4", "i8"])
    def test_integers_of_every_type_are_classes(self, kind):
        labels = self.LABELS.astype(kind)
        logarithms = self.LOGITS - np.log(np.exp(self.LOGITS).sum(axis=1, keepdims=True))
        loss = evaluate(lambda: workload.softmax_cross_entropy(tf.constant(self.LOGITS), tf.constant(labels)))
        assert loss == pytest.approx(-(logarithms[0, 1] + logarithms[1, 0]) / 2)
        hits = evaluate(lambda: workload.classification_metrics(tf.constant(self.LOGITS), tf.constant(labels)))
        np.testing.assert_array_equal(hits["precision @ 1"], [1, 0])
