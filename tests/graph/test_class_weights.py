"""Weights of classes and examples: against numpy, over towers, and in evaluations."""

import dataclasses

import keras
import numpy as np
import pytest
import toy_workload
import trainings
import values

from tower_train import Examples, keras_network, mean_squared_error, softmax_cross_entropy
from tower_train.graph import devices
from tower_train.graph.step_plan import parse_class_weights
from tower_train.inference.evaluator import Evaluator

CLASSES, STEPS, RATE = ("often", "at times", "rarely"), 5, 0.5
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=[12, 4]), np.array([0] * 7 + [1] * 4 + [2])
OF_EXAMPLES = RNG.uniform(0, 3, 12)
OF_CLASSES = (12 / (3 * np.bincount(LABELS)))[LABELS]  # as scikit-learn: n_samples / (n_classes * np.bincount(y))
WAYS = {  # {what: (options, weights of examples or None, factors of the losses)}
    "by name": (dict(class_weight="rarely:4.5,1:0"), None, np.array([1, 0, 4.5])[LABELS]),
    "of examples": ({}, OF_EXAMPLES, OF_EXAMPLES),
    "of both": (dict(class_weight="balanced"), OF_EXAMPLES, OF_EXAMPLES * OF_CLASSES),
}


def build():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(3, kernel_initializer="zeros", name="dense")])


def examples(weights=None, labels=LABELS):
    return Examples.from_arrays("few", FEATURES, labels, CLASSES, weights)


WORKLOAD = dataclasses.replace(toy_workload.WORKLOAD, augment=None, inference=keras_network(build))


def trained(data, workload=WORKLOAD, **options):
    """The losses and the kernel after steps of all examples, in whatever order."""
    options = dict(dtype="float64", learning_rate=RATE) | options
    losses, variables = trainings.train(workload, data, STEPS, **options)
    return losses, next(value for name, value in variables.items() if name.endswith("dense/kernel"))


def by_numpy(weights):
    """The same as Keras' fit has it: the gradient of sum(weight * loss) / number of examples."""
    kernel, bias, losses, targets = np.zeros([4, 3]), np.zeros(3), [], np.eye(3)[LABELS]
    for _ in range(STEPS):
        exps = np.exp(FEATURES @ kernel + bias)
        probabilities = exps / exps.sum(axis=1, keepdims=True)
        losses.append(np.sum(-weights * np.log(probabilities[np.arange(12), LABELS])) / 12)
        slopes = weights[:, np.newaxis] * (probabilities - targets) / 12
        kernel, bias = kernel - RATE * FEATURES.T @ slopes, bias - RATE * slopes.sum(axis=0)
    return losses, kernel


@pytest.mark.parametrize(("options", "weights", "factors"), WAYS.values(), ids=WAYS)
def test_weights_are_those_of_numpy_over_towers(options, weights, factors):
    found = trained(examples(weights), num_gpus=2, batch_size=6, **options)
    for mine, theirs in zip(found, by_numpy(factors), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_a_loss_of_keras_gets_its_arguments_in_its_order_and_the_weights():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = trained(examples(OF_EXAMPLES), dataclasses.replace(WORKLOAD, loss=loss), batch_size=6, num_gpus=2)
    np.testing.assert_allclose(found[1], by_numpy(OF_EXAMPLES)[1], atol=1e-12)  # in float64, as the run


def test_the_loss_of_an_evaluation_counts_the_weights_and_its_metrics_do_not():
    placed = devices.place(devices.DeviceOptions(device="cpu"))
    data = examples(OF_EXAMPLES)
    evaluator = Evaluator(dataclasses.replace(WORKLOAD, test_time_augmentation=None), data, 5, "float64", 0.0, placed)
    evaluator._session.run(evaluator._initial)
    metrics = evaluator._metrics(evaluator._count(evaluator._session, 3))
    assert metrics["loss"].mean == pytest.approx(np.log(3) * OF_EXAMPLES.mean(), rel=1e-6)
    assert metrics["precision @ 1"].mean == 0  # a tie of all
    evaluator.close()
    with pytest.raises(RuntimeError, match="closed"):
        evaluator._session.run(evaluator._initial)


def test_losses_of_several_numbers_are_weighed_by_example():
    outputs, labels, weights = RNG.normal(size=[6, 6]), RNG.normal(size=[6, 6]), RNG.uniform(size=6)
    logits, kinds = RNG.normal(size=[6, 6, 3]), RNG.integers(0, 3, size=[6, 6])
    found = (
        values.of(mean_squared_error, outputs, labels, weights),
        values.of(lambda *given: softmax_cross_entropy(*given[:2], weights=given[2]), logits, kinds, weights),
    )
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    of_examples = -np.take_along_axis(logs, kinds[..., np.newaxis], axis=-1)[..., 0].mean(axis=1)
    expected = [np.mean(weights * np.mean((outputs - labels) ** 2, axis=1)), np.mean(weights * of_examples)]
    np.testing.assert_allclose(found, expected)


def test_classes_without_an_example_or_without_labels_at_hand_count_as_others():
    weights = parse_class_weights("balanced", examples(labels=np.array([0] * 9 + [2] * 3)))
    np.testing.assert_allclose(weights, [12 / (2 * 9), 1, 12 / (2 * 3)])
    names_only = dataclasses.replace(examples(), labels=None)
    np.testing.assert_array_equal(parse_class_weights("rarely:2,0:0.5", names_only), [0.5, 1, 2])
