"""Lookahead against numpy, through restarts, on several towers and with mirrored variables."""

import jobs
import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train import Examples, Workload, layers

v1 = tf.compat.v1
EXAMPLES, BATCH = 40, 8
RATE, MOMENTUM, NORM_MOMENTUM, EPSILON = 0.02, 0.75, 0.5, 1e-3
EVERY, DECAY, RAMP = 3, 0.75, 2.0
OPTIONS = dict(dtype="float64", learning_rate=RATE, optimizer="momentum", momentum=MOMENTUM, moving_average_decay=0.5,
               lookahead_every_steps=EVERY, lookahead_decay=DECAY, lookahead_ramp=RAMP)  # fmt: skip


def load(request=None):
    rng = np.random.default_rng(0)
    return Examples.from_arrays("linear", rng.normal(1, 2, [EXAMPLES, 4]), rng.normal(size=[EXAMPLES, 3]))


def network(features, training):
    normal = layers.batch_normalization(features, training, NORM_MOMENTUM, EPSILON, name="norm")
    with layers.frozen():
        normal *= v1.get_variable("frozen", [4], features.dtype)
    return normal @ v1.get_variable("kernel", [4, 3], features.dtype)


def squared_error(outputs, labels):
    return tf.reduce_mean(tf.reduce_sum(tf.square(outputs - labels), axis=1))


WORKLOAD = Workload("linear", load, network, squared_error)
TRAINED = ("norm/gamma", "norm/beta", "kernel")
AHEAD = (*TRAINED, "norm/moving_mean", "norm/moving_variance")


class Oracle:
    """A step's change of all variables, in numpy."""

    def __init__(self, values, max_steps):
        self.fast, self.frozen = {name: values[name] for name in AHEAD}, values["frozen"]
        self.velocity, self.average = dict.fromkeys(TRAINED, 0.0), dict(self.fast)
        self.slow, self.step, self.max_steps = None, 0, max_steps

    def gradients(self, x, y):
        gamma, beta, kernel = (self.fast[name] for name in TRAINED)
        unit = (x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON)
        inputs = (gamma * unit + beta) * self.frozen
        residual = 2 * (inputs @ kernel - y) / len(x)
        back = residual @ kernel.T * self.frozen
        return {"norm/gamma": (back * unit).sum(0), "norm/beta": back.sum(0), "kernel": inputs.T @ residual}

    def train(self, x, y):
        for name, gradient in self.gradients(x, y).items():
            self.velocity[name] = MOMENTUM * self.velocity[name] + gradient
            self.fast[name] = self.fast[name] - RATE * self.velocity[name]
        for name, value in (("norm/moving_mean", x.mean(0)), ("norm/moving_variance", x.var(0))):
            self.fast[name] = NORM_MOMENTUM * self.fast[name] + (1 - NORM_MOMENTUM) * value
        self.step += 1
        if self.step % EVERY == 0:
            decay = DECAY * (self.step / self.max_steps) ** RAMP
            if self.slow:
                self.fast = {name: decay * self.slow[name] + (1 - decay) * fast for name, fast in self.fast.items()}
            self.slow = dict(self.fast)
        if self.step == self.max_steps:
            self.fast = dict(self.slow)
        # TensorFlow has this decay in float32; it sees the number of steps before this one.
        decay = min(np.float32(0.5), np.float32(self.step) / np.float32(9 + self.step))
        for name, fast in self.fast.items():
            self.average[name] = self.average[name] - np.float64(np.float32(1) - decay) * (self.average[name] - fast)


@pytest.mark.parametrize("max_steps", [9, 11])
def test_each_step_is_that_of_the_formula(open_training, max_steps):
    """Ending with an update and between two; afterwards there is none out of turn."""
    workload, seen = trainings.noting(WORKLOAD)
    with open_training(workload, load(), batch_size=BATCH, max_steps=max_steps, **OPTIONS) as (built, session):
        variables = {variable.op.name: variable for variable in built.variables}
        oracle = Oracle(session.run(variables), max_steps)
        for step in range(1, max_steps + 1):
            (x, y), _ = session.run((seen, built.report))
            oracle.train(x, y)
            found = session.run(variables)
            for suffix, expected in (("", oracle.fast), ("/ExponentialMovingAverage", oracle.average),
                                     ("/Lookahead", oracle.slow)):  # fmt: skip
                for name, value in (expected or {}).items():
                    np.testing.assert_allclose(found[name + suffix], value, rtol=1e-9, atol=1e-11, err_msg=f"{step}")
            assert found["lookahead/updates"] == step // EVERY + (step == 11)
        assert {name for name in found if name.endswith("/Lookahead")} == {f"{name}/Lookahead" for name in AHEAD}
        for name in AHEAD:
            assert found[name].tobytes() == found[f"{name}/Lookahead"].tobytes(), name


def test_towers_are_one():
    one = trainings.train(WORKLOAD, load(), 11, batch_size=BATCH, max_steps=11, **OPTIONS)
    mirrored = dict(variable_update="mirrored", check_mirrors_every_steps=1)
    for towers, options in ((4, {}), (2, mirrored)):
        options |= OPTIONS | dict(num_gpus=towers, batch_size=BATCH // towers, sync_batch_norm=True, max_steps=11)
        trainings.assert_same(trainings.train(WORKLOAD, load(), 11, **options), one)


def test_accumulated_batches_are_one():
    """Without batch normalisation, which they part in."""
    workload = Workload("plain", load, lambda x, training: x @ v1.get_variable("w", [4, 3], x.dtype), squared_error)
    one, two = (
        trainings.train(workload, load(), 7, batch_size=BATCH // steps, accumulate_steps=steps, max_steps=7, **OPTIONS)
        for steps in (1, 2)
    )
    trainings.assert_same(two, one)


def run(train_dir, hooks=(), **options):
    return jobs.train_toy(train_dir, hooks, WORKLOAD, **(OPTIONS | dict(num_gpus=1, batch_size=BATCH) | options))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    run(tmp_path / "whole", max_steps=11)
    for steps in (2, 3, 99):  # ends before the first update, and between two
        run(tmp_path / "parts", [jobs.stop_at(steps)], max_steps=11)
    whole, parts = (jobs.variables(tmp_path / name) for name in ("whole", "parts"))
    assert whole["lookahead/updates"] == 4
    jobs.assert_identical(parts, whole)


def test_a_run_that_is_given_more_steps_goes_on_from_its_slow_weights(tmp_path):
    run(tmp_path, max_steps=4)
    ended = jobs.variables(tmp_path)
    run(tmp_path, max_steps=5)  # not one of the regular updates: the new last step ends at the slow weights again
    longer = jobs.variables(tmp_path)
    for name in AHEAD:
        jobs.assert_identical({"": longer[name]}, {"": ended[name]})
    assert not np.array_equal(longer["kernel/Momentum"], ended["kernel/Momentum"])


def test_a_run_that_begins_with_it_later_has_no_slow_weights_from_before(tmp_path):
    """Variables that are initialised afresh are no slow weights to go back to."""
    run(tmp_path, max_steps=4, lookahead_every_steps=0, lookahead_decay=0.5, lookahead_ramp=0.0)
    before = jobs.variables(tmp_path)
    run(tmp_path, max_steps=9, override=True, learning_rate=1e-12)
    after = jobs.variables(tmp_path)
    assert "lookahead/updates" not in before and after["lookahead/updates"] == 2
    np.testing.assert_allclose(after["kernel"], before["kernel"], atol=1e-9)


def test_a_skipped_step_has_no_update(open_training):
    """One example is not a number; there is an update after each of the other steps."""
    features = np.random.default_rng(0).normal(size=[EXAMPLES, 4])
    features[7] = np.nan
    examples = Examples.from_arrays("bad", features, np.zeros([EXAMPLES, 3]))
    options = OPTIONS | dict(lookahead_every_steps=1, on_nonfinite="skip", batch_size=BATCH)
    with open_training(WORKLOAD, examples, **options) as (built, session):
        variables = {variable.op.name: variable for variable in built.variables}
        after, skipped = session.run(variables), []
        for _ in range(EXAMPLES // BATCH):
            before, report = after, session.run(built.report)
            after = session.run(variables)
            changed = {name for name in after if after[name].tobytes() != before[name].tobytes()}
            skipped.append(not report.finite.all())
            assert changed == ({"global_step", "examples_seen"} if skipped[-1] else after.keys() - {"frozen"})
    assert sum(skipped) == 1 and after["lookahead/updates"] == EXAMPLES // BATCH - 1


def test_steps_without_an_update_pass_over_no_weights(open_training):
    tracing = v1.RunOptions(trace_level=v1.RunOptions.SOFTWARE_TRACE)
    with open_training(WORKLOAD, load(), batch_size=BATCH, **OPTIONS) as (built, session):
        assigned = []
        for _ in range(EVERY):
            metadata = v1.RunMetadata()
            session.run(built.report, options=tracing, run_metadata=metadata)
            names = [node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats]
            assigned.append(sum("lookahead" in name and "AssignVariableOp" in name for name in names))
    assert assigned == [0] * (EVERY - 1) + [2 * len(AHEAD)]
