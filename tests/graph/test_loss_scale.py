"""Training in float16 is what numpy does with its float16, and finds the same loss scale.

The network is linear and so is its loss, and all numbers are small whole ones and powers of two, so that nothing is
rounded: what numpy finds is to be found to the bit. Some examples are so large that the scale overflows with them.
"""

import dataclasses

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import errors
from tower_train.graph import loss_scale
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1
FEATURES, STEPS, RATE, MOMENTUM = 3, 40, 2.0**-6, 0.875


def network(features, training):
    """Looks a row up besides, whose gradient is sparse."""
    weights = v1.get_variable("weights", [FEATURES, 2], features.dtype, v1.zeros_initializer())
    rows = v1.get_variable("rows", [4, 2], tf.float32, v1.zeros_initializer())
    return features @ weights + tf.cast(tf.gather(rows, [1, 2, 1]), features.dtype)[:1]


def loss(outputs, labels):
    return tf.reduce_mean(outputs * tf.one_hot(labels, 2, on_value=2.0, off_value=-1.0))


WORKLOAD = Workload("linear", lambda request: None, network, loss)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 3)


def of_tower(features, labels, scale):
    """A tower's gradients: the scaled loss's in float16, then over the scale."""
    one_hot = np.where(np.arange(2) == labels[:, np.newaxis], 2, -1)
    with np.errstate(over="ignore"):
        upstream = (np.float32(scale) * one_hot / one_hot.size).astype(np.float16)
        weights = (features.astype(np.float32).T @ upstream.astype(np.float32)).astype(np.float16)
        row = upstream.sum(axis=0, dtype=np.float32).astype(np.float16)
    rows = np.stack([np.zeros(2), row, np.zeros(2), np.zeros(2)])
    return weights.astype(np.float32) / np.float32(scale), rows.astype(np.float32) / np.float32(scale)


class Simulation:
    """Momentum with a loss scale, as Keras' LossScaleOptimizer has it."""

    def __init__(self, first):
        self.scale, self.finite_steps, self.overflows = first, 0, 0
        self.weights, self.rows = np.zeros([FEATURES, 2], np.float32), np.zeros([4, 2], np.float32)
        self.slots = [np.zeros_like(self.weights), np.zeros_like(self.rows)]

    def step(self, batches):
        """batches: over towers, (features, labels)."""
        with np.errstate(invalid="ignore"):
            grads = [np.mean(own, axis=0) for own in zip(*(of_tower(*b, self.scale) for b in batches), strict=True)]
        if not all(np.isfinite(grad).all() for grad in grads):
            self.scale, self.finite_steps, self.overflows = self.scale / 2, 0, self.overflows + 1
            return
        for values, slot, grad in zip((self.weights, self.rows), self.slots, grads, strict=True):
            slot *= MOMENTUM
            slot += grad
            values -= RATE * slot
        self.finite_steps += 1
        if self.finite_steps == 3:
            self.scale, self.finite_steps = 2 * self.scale, 0


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (dict(batch_size=8), 2.0**15),
        (dict(num_gpus=2, batch_size=4, variable_update="mirrored"), 2.0**24),
        (dict(num_gpus=2, batch_size=2, accumulate_steps=2, clip_gradients=1e6), 2.0**12),
    ],
)
def test_weights_and_scale_are_those_of_numpy(soon, monkeypatch, options, first):
    monkeypatch.setattr(loss_scale, "FIRST", first)
    features = np.random.default_rng(0).integers(-3, 4, [64, FEATURES])
    features[::9] *= 64  # every ninth is large
    examples = Examples.from_arrays("whole numbers", features.astype(np.float32), np.arange(64, dtype=np.int32) % 2)
    workload, seen = trainings.noting(WORKLOAD)
    expected = Simulation(first)
    options = dict(dtype="float16", optimizer="momentum", momentum=MOMENTUM, learning_rate=RATE) | options
    with trainings.opened(workload, examples, ema=0.0, **options) as (built, session):
        for step in range(1, STEPS + 1):
            before = expected.overflows
            found, report = session.run((seen, built.report))
            expected.step(list(zip(found[::2], found[1::2], strict=True)))
            assert (report.loss_scale, report.overflowed) == (expected.scale, expected.overflows > before)
            assert (report.step, report.examples) == (step, 8 * step)
        found = {v.op.name: session.run(v) for v in built.saved.variables}
    assert 5 < expected.overflows < STEPS // 2
    assert found["loss_scale/finite_steps"] == expected.finite_steps
    np.testing.assert_array_equal(found["weights"], expected.weights)
    np.testing.assert_array_equal(found["rows"], expected.rows)
    np.testing.assert_array_equal(found["weights/Momentum"], expected.slots[0])


def test_it_stays_below_infinity_where_all_gradients_are_zero(monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**126)
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 1)
    zeros = Examples.from_arrays("zeros", np.zeros([8, FEATURES], np.float32), np.zeros(8, np.int32))
    zero = Workload("zero", None, network, lambda outputs, labels: 0 * tf.reduce_sum(outputs))
    with trainings.opened(zero, zeros, batch_size=8, dtype="float16") as (built, session):
        reports = [session.run(built.report) for _ in range(3)]
        assert [(report.loss_scale, report.overflowed) for report in reports] == 3 * [(2.0**127, False)]


class TestRuns:
    OPTIONS = jobs.EVERY_STEP | dict(dtype="float16", summary_every_steps=0)

    def test_a_run_is_the_same_whether_or_not_it_is_resumed_and_skips_quietly(
        self, tmp_path, monkeypatch, soon, capsys
    ):
        monkeypatch.setattr(loss_scale, "FIRST", 2.0**22)
        for name, steps in (("parts", 6), ("parts", 14), ("whole", 14)):
            result = jobs.train_toy(tmp_path / name, max_steps=steps, **self.OPTIONS)
        assert result.skipped_steps == 0
        jobs.assert_identical(jobs.variables(tmp_path / "parts", 14), jobs.variables(tmp_path / "whole", 14))
        metrics = jobs.metrics_but_times(tmp_path / "whole")
        assert jobs.metrics_but_times(tmp_path / "parts") == metrics
        scales = [record["loss_scale"] for record in metrics]
        before = [2.0**22, *scales[:-1]]
        skipped = [i + 1 for i in range(14) if scales[i] < before[i]]
        assert len(skipped) > 2 and any(scales[i] > before[i] for i in range(14))
        assert [event.value for event in jobs.events(tmp_path / "whole").Scalars("loss_scale")] == scales
        output = capsys.readouterr().out
        for step in skipped:
            line = f"*** loss scale: too great at step {step}, which is skipped; now {scales[step - 1]:g}.\n"
            assert output.count(line) == 2
        assert output.count("loss scale: too great") == 2 * len(skipped) and "not finite" not in output

    def test_what_is_not_finite_at_scale_1_is_a_fault(self, tmp_path, monkeypatch, capsys):
        """The square root of 0 adds nothing to the loss and NaN to its gradients."""
        monkeypatch.setattr(loss_scale, "FIRST", 4.0)
        toy = toy_workload.WORKLOAD
        workload = dataclasses.replace(toy, loss=lambda y, labels: toy.loss(y, labels) + tf.reduce_sum(tf.sqrt(0 * y)))
        for name, steps, fault in (("stop", 3, "tower_0: the gradient"), ("skip", 12, ".* It is number 10 in a row")):
            with pytest.raises(errors.NonFiniteError, match=f"^not finite at step {steps}: {fault}"):
                jobs.train_toy(tmp_path / name, max_steps=19, workload=workload, on_nonfinite=name, **self.OPTIONS)
            assert capsys.readouterr().out.count("loss scale: too great") == 2

    def test_a_loss_that_is_not_finite_is_a_fault_at_any_scale(self, tmp_path):
        """Features whose products overflow float16, whose greatest number is 65,504."""
        with pytest.raises(errors.NonFiniteError, match="^not finite at step 6: tower_1: the loss"):
            jobs.train_toy(tmp_path, max_steps=12, workload=toy_workload.poisoned(90, 91, 6e4), **self.OPTIONS)
        assert jobs.variables(tmp_path, 5)["loss_scale/scale"] == 2.0**15
