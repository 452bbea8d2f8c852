"""The range test of learning rates: its rates reach the update, and its suggestion is where the loss falls fastest."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import toy_workload

from tower_train import Config, Examples, errors, find_rate

RATES = np.geomspace(1e-5, 10, 200)


def test_the_suggested_rate_is_that_of_the_fastest_fall_before_the_lowest_loss():
    falls = 2 / (1 + np.exp(3 * np.log(RATES / 0.02)))  # fastest at 0.02
    losses = falls + np.maximum(0, np.log(RATES / 0.5)) + 0.5
    losses[-20:-10] -= 3 * np.linspace(0, 1, 10) * (losses[-20:-10] > 9)  # and not a later fall
    assert find_rate.suggested(RATES, losses) == pytest.approx(0.02, rel=0.15)
    diverging = np.where(RATES < 0.3, 2 - RATES, 2.3)  # the fastest fall is the last
    assert find_rate.suggested(RATES, diverging) == pytest.approx(0.03, rel=0.1)
    below_zero = falls - 2
    assert not find_rate.has_diverged(list(below_zero))
    assert find_rate.suggested(RATES, below_zero) == pytest.approx(0.02, rel=0.2)
    assert find_rate.suggested(RATES, 1 + np.log10(1 + RATES)) is None
    assert find_rate.suggested(RATES, np.full(200, 2.3)) is None
    np.testing.assert_allclose(find_rate.smoothed([3.0] * 50), 3)
    assert find_rate.smoothed([1.0, 2.0])[1] == pytest.approx((0.98 * 0.02 * 1 + 0.02 * 2) / (1 - 0.98**2))


def linear(features, training):
    return features @ tf.compat.v1.get_variable("weights", [4, 3], features.dtype, tf.zeros_initializer())


def test_each_step_is_done_at_its_rate():
    rng, steps = np.random.default_rng(0), 40
    features, labels = rng.normal(size=[12, 4]), np.arange(12) % 3
    examples = Examples.from_arrays("few", features, labels, toy_workload.CLASSES)
    workload = dataclasses.replace(toy_workload.WORKLOAD, examples=lambda r: examples, inference=linear, augment=None)
    config = Config(num_gpus=2, batch_size=6, dtype="float64", device="cpu")
    rates, found = find_rate.range_test(workload, config, steps)
    weights, losses = np.zeros([4, 3]), []
    for rate in np.geomspace(1e-5, 10, steps):
        exps = np.exp(features @ weights)
        probabilities = exps / exps.sum(axis=1, keepdims=True)
        losses.append(-np.mean(np.log(probabilities[np.arange(12), labels])))
        weights = weights - rate * features.T @ (probabilities - np.eye(3)[labels]) / 12
    np.testing.assert_allclose(rates, np.geomspace(1e-5, 10, steps)[: len(rates)])
    np.testing.assert_allclose(found, find_rate.smoothed(losses)[: len(found)], rtol=1e-5)  # rates are in float32


def test_the_command_draws_and_suggests_and_refuses_what_never_learns(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = command(find_rate, "--workload=toy_workload", "--optimizer=adam", "--max_steps=80")
    assert status == 0, stderr
    rate = float(stdout.split("--learning_rate=")[1].split()[0])
    assert 1e-4 < rate < 1 and f"={rate:.2g} (adam, 128 examples a step)\n" in stdout
    assert (tmp_path / "find_rate.png").read_bytes()[1:4] == b"PNG"
    monkeypatch.setattr(find_rate, "_HIGHEST", 1e-4)
    status, _, stderr = command(find_rate, "--workload=toy_workload", "--max_steps=20")
    assert status == errors.ConfigError.exit_status and "the loss falls at no rate from 1e-05 to 0.0001" in stderr


def test_options_of_other_processes_and_of_epochs_are_refused_also_in_a_file(tmp_path):
    (tmp_path / "epochs").write_text("--epochs=2\n")
    (tmp_path / "steps").write_text("--max_steps=7\n")
    for word, name in (("--worker_hosts=a:1", "worker_hosts"), (f"--flagfile={tmp_path}/epochs", "epochs")):
        with pytest.raises(errors.ConfigError, match=f"--{name}: a range test is of one process and seed, and counts"):
            find_rate.asked_steps(["find_rate", "--num_gpus=2", word])
    asked = [
        find_rate.asked_steps(["find_rate", "--units=3", *more]) for more in ([], [f"--flagfile={tmp_path}/steps"])
    ]
    assert asked == [200, 7]
