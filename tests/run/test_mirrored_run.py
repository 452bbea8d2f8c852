"""Runs with mirrored variables: the copies are compared."""

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import errors

v1 = tf.compat.v1
OPTIONS = dict(dtype="float64", learning_rate=0.001, save_every_steps=0, clip_gradients=1.0)
MIRRORED = dict(variable_update="mirrored")


class Disturb(v1.train.SessionRunHook):
    """Changes the last bit of one number in one copy, after a step."""

    def begin(self):
        copy = next(v for v in v1.local_variables() if v.op.name == "copy_1/hidden/weights/Momentum")
        bits = tf.bitwise.bitwise_xor(
            tf.bitcast(copy.read_value(), tf.int64), tf.scatter_nd([[1, 2]], np.int64([1]), [4, 8])
        )
        self._disturb = copy.assign(tf.bitcast(bits, copy.dtype))

    def after_run(self, context, values):
        self._steps = getattr(self, "_steps", 0) + 1
        if self._steps == 5:
            context.session.run(self._disturb)


def test_copies_that_differ_by_a_bit_end_the_run_before_it_saves(tmp_path, monkeypatch):
    options = OPTIONS | MIRRORED | dict(check_mirrors_every_steps=3, save_every_steps=3)
    with pytest.raises(errors.MirrorError, match=r"after step 6 copy 1 of (hidden|softmax_linear)/.* copy 0 is"):
        jobs.train_toy(tmp_path, [Disturb()], max_steps=9, **options)
    assert jobs.saved_steps(tmp_path) == [3]
    assert "after step 6" in jobs.read_json(tmp_path, "result.json")["stopped_by"]
