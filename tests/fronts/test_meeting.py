"""Towers that meet: one program, and copies of what it makes, which meet where something concerns all."""

import numpy as np
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import meeting
from tower_train.fronts.averages import Averages

v1 = tf.compat.v1
HOSTS = ["/cpu:0"] * 3


def total(values):
    return sum(values)


def test_a_program_is_run_once_and_copied_and_merges_in_its_place():
    happened = []
    with tf.Graph().as_default(), v1.name_scope("outer"), tf.device("/task:1"), v1.Session():
        towers = meeting.Towers(["/cpu:0", "/gpu:0", "/gpu:1"], scope="outer/of_0/")
        before = tf.no_op("before")
        variable = v1.get_variable("v", initializer=1.0, use_resource=True)

        def program():
            happened.append("begins")
            with v1.name_scope("of_0"), tf.device("/job:a"):
                batch = towers.mine([tf.constant([i]) for i in range(3)])

                def merge(values):
                    assert meeting.current() is None and tf.constant(0).op.control_inputs == [before]
                    happened.append("merge")
                    return tf.add_n(values, name="merged")

                merged = meeting.meet(tf.square(batch, name="square"), merge, "here")
                own = tf.multiply(tf.cast(merged + batch, tf.float32), variable, name="own")
            happened.append("ends")
            return merged, own

        with tf.control_dependencies([before]):
            results = towers.over_towers(towers.run(program))
        after = tf.constant(1)
        assert happened == ["begins", "merge", "ends"]
        assert {merged.name for merged, _ in results} == {"outer/of_0/merged:0"}
        assert [own.name for _, own in results] == ["outer/of_0/own:0", "tower_1/own:0", "tower_2/own:0"]
        for (_, own), device in zip(results, ("CPU:0", "GPU:0", "GPU:1"), strict=True):
            assert own.device == f"/job:a/task:1/device:{device}"
        assert after.op.control_inputs == [] and after.device == "/task:1" and meeting.current() is None
        assert len({own.op.inputs[1].op for _, own in results}) == 1  # one reading of the variable


def test_copies_are_of_their_parts_of_the_batch():
    """With loops, whose gradients let them grow, branches, parts of several sizes, and what must be done once."""

    def of(x, w):
        looped = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * w), [0, x])[1]
        chosen = tf.cond(tf.reduce_sum(x) > 3, lambda: looped * 2, lambda: looped)
        loss = tf.reduce_sum(chosen**2)
        return [loss, *tf.gradients(loss, [x, w])]

    @tf.function
    def step(w, *parts):
        towers, counted = meeting.Towers(HOSTS), tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="counted")
        tf.raw_ops.AssignVariableOp(resource=counted, value=0)

        def program():
            x = towers.mine(parts)
            tf.raw_ops.AssignAddVariableOp(resource=counted, value=1)
            return of(x, tf.identity(w))

        alone = [of(tf.identity(part), tf.identity(w)) for part in parts]
        ours = towers.over_towers(towers.run(program))
        return ours, alone, tf.raw_ops.ReadVariableOp(resource=counted, dtype=tf.int32)

    parts = [tf.constant(np.arange(1.0, n)) for n in (2, 4, 3)]
    ours, alone, count = step(tf.constant(1.5, tf.float64), *parts)
    assert int(count) == 1
    for found, expected in zip(tf.nest.flatten(ours), tf.nest.flatten(alone), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_one_tower_and_none_merge_by_themselves():
    for run in (lambda f: f(), lambda f: meeting.Towers(["/cpu:0"]).run(f)):
        with tf.Graph().as_default():
            assert run(lambda: meeting.meet(3, total, "here")) == 3
            # In a branch too, where one tower does what the program says.
            in_branch = lambda: meeting.meet(tf.constant(3), total, "here")  # noqa: E731
            chosen = run(lambda: tf.cond(tf.constant(True), in_branch, lambda: tf.constant(4)))  # noqa: B023
            assert v1.Session().run(chosen) == 3


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: tf.cond(tf.constant(True), lambda: meeting.meet(0, total, "An update"), lambda: 0),
         "An update is inside of a branch"),
        (lambda: tf.function(lambda: meeting.meet(0, total, "An update"), autograph=False)(),
         "is inside of a branch, .*function"),
    ],
)  # fmt: skip
def test_towers_that_cannot_meet_say_where(program, message):
    with tf.Graph().as_default(), pytest.raises(errors.GraphError, match=message):
        meeting.Towers(HOSTS).run(program)


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
        towers, averages = meeting.Towers(HOSTS), Averages([1 / 3] * 3)

        def program():
            mine = towers.mine([tf.constant(x[4 * i :][:4]) for i in range(3)])
            with averages.inside(towers, [mine], "global"):
                return gradient_of(tf.identity(w), mine, averages.mean)

        return [tf.add_n(towers.over_towers(towers.run(program))) / 3, gradient_of(tf.identity(w), x, list)]

    if graph == "tf.function":
        ours, one = (value.numpy() for value in tf.function(of_towers, autograph=False)(w))
    else:
        with tf.Graph().as_default(), v1.Session() as session:
            ours, one = session.run(of_towers(w))
    np.testing.assert_allclose(ours, one, rtol=0, atol=1e-12)
