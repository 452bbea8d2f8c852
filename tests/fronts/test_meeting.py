"""Towers that meet: threads of which one runs at a time, each with its own place in the graph."""

import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf

from tower_train.fronts import meeting
from tower_train.fronts.averages import Averages

v1 = tf.compat.v1
HOSTS = ["/cpu:0"] * 3


def total(values):
    return sum(values)


def test_towers_run_in_turn_and_the_first_one_merges_in_its_place():
    happened = []

    def program(tower):
        happened.append(f"{tower.index} begins")
        with v1.name_scope(f"of_{tower.index}"), tf.device("/job:a"):

            def merge(values):
                assert meeting.current() is None
                happened.append("merge")
                return tf.constant(sum(values), name="merged")

            merged = meeting.meet(tower.index, merge, "here")
            own = tf.constant(0, name="own")
        happened.append(f"{tower.index} ends")
        return merged, own

    with tf.Graph().as_default(), v1.name_scope("outer"), tf.device("/task:1"), v1.Session() as session:
        before, threads = tf.no_op("before"), threading.active_count()
        with tf.control_dependencies([before]):
            results = meeting.Towers(["/cpu:0", "/gpu:0", "/gpu:1"]).run(program)
        after = tf.constant(1)
        assert session.graph.get_operations() and threading.active_count() <= threads
    assert happened == [f"{i} begins" for i in range(3)] + ["merge"] + [f"{i} ends" for i in range(3)]
    assert {merged.name for merged, _ in results} == {"outer/of_0/merged:0"}
    for i, (merged, own) in enumerate(results):
        assert own.name == f"outer/of_{i}/own:0" and own.op.control_inputs == merged.op.control_inputs == [before]
        assert own.device == f"/job:a/task:1/device:{('CPU:0', 'GPU:0', 'GPU:1')[i]}"
    assert after.op.control_inputs == [] and after.device == "/task:1" and meeting.current() is None


def test_blocks_of_a_tower_give_attributes_to_its_own_ops_only():
    """tf.xla.experimental.jit_scope around a meeting: the graph has one set of such attributes for all threads."""

    def program(tower):
        with contextlib.nullcontext() if tower.index == 1 else tf.xla.experimental.jit_scope():
            before = tf.no_op(f"before_{tower.index}")
            merged = meeting.meet(0, lambda _: tf.no_op("merged"), "here")
            within = tf.no_op(f"within_{tower.index}")
        return [before, within, merged, tf.no_op(f"after_{tower.index}")]

    with tf.Graph().as_default():
        ops = meeting.Towers(HOSTS).run(program)
        outside = tf.no_op("outside")
    marked = [[op.node_def.attr["_XlaCompile"].b for op in of_tower] for of_tower in ops]
    assert marked == [[True, True, False, False], [False] * 4, [True, True, False, False]]
    assert not outside.node_def.attr["_XlaCompile"].b


def test_one_tower_and_none_merge_by_themselves():
    for run in (lambda f: f(None), lambda f: meeting.Towers(["/cpu:0"]).run(f)[0]):
        with tf.Graph().as_default():
            assert run(lambda tower: meeting.meet(3, total, "here")) == 3
            # In a branch too, where one tower does what the program says.
            in_branch = lambda: meeting.meet(tf.constant(3), total, "here")  # noqa: E731
            chosen = run(lambda tower: tf.cond(tf.constant(True), in_branch, lambda: tf.constant(4)))  # noqa: B023
            assert v1.Session().run(chosen) == 3


@pytest.mark.parametrize("faulty", range(3))
def test_an_error_in_one_tower_ends_the_others_where_they_wait(faulty):
    ended = []

    def program(tower):
        try:
            meeting.meet(0, total, "first")
            if tower.index == faulty:
                raise KeyError(f"of tower {faulty}")
            meeting.meet(0, total, "second")
        except Exception:
            assert tower.index == faulty
            raise
        finally:
            ended.append(tower.index)
            if tower.index != faulty:
                meeting.meet(0, total, "on its way out")

    before = threading.active_count()
    with tf.Graph().as_default(), pytest.raises(KeyError, match=f"of tower {faulty}"):
        meeting.Towers(HOSTS).run(program)
    assert sorted(ended) == [0, 1, 2] and threading.active_count() == before


@pytest.mark.parametrize("graph", ["session", "tf.function"])
def test_a_mean_over_towers_has_the_gradients_of_one_device(graph):
    """A normalised batch, and a penalty on its gradient: second derivatives go through the mean too."""
    x, w = np.random.default_rng(0).normal(size=[12, 4]), np.linspace(1, 2, 4)

    def gradient_of(w, x, mean):
        def loss(w, x):
            h = x * w
            [m] = mean([tf.reduce_mean(h, 0)])
            [v] = mean([tf.reduce_mean(tf.square(h - m), 0)])
            return tf.reduce_mean(tf.reduce_sum((h - m) / tf.sqrt(v + 1e-3), 1) ** 3)

        [slope] = tf.gradients(loss(w, x), w)
        penalised = loss(w, x) + tf.reduce_sum(tf.square(mean([slope])[0]))
        return tf.gradients(penalised, w)[0]

    def of_towers(w):
        mean = Averages([1 / 3] * 3).mean
        grads = meeting.Towers(HOSTS).run(lambda tower: gradient_of(tf.identity(w), x[4 * tower.index :][:4], mean))
        return [tf.add_n(grads) / 3, gradient_of(tf.identity(w), x, list)]

    if graph == "tf.function":
        ours, one = (value.numpy() for value in tf.function(of_towers, autograph=False)(w))
    else:
        with tf.Graph().as_default(), v1.Session() as session:
            ours, one = session.run(of_towers(w))
    np.testing.assert_allclose(ours, one, rtol=0, atol=1e-12)
