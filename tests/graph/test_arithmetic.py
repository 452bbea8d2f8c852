"""Training a small dense network is the arithmetic that numpy does: gradients, optimizers, weight decay, averages.

A step's global batch is the whole data set, so a step does not depend on the order in which examples come.
"""

import numpy as np
import pytest
import tensorflow as tf

from tower_train.workload import Examples, Workload

v1 = tf.compat.v1

NUM_EXAMPLES, FEATURES, HIDDEN, CLASSES = 24, 6, 5, 3
STEPS = 50
WEIGHT_DECAY = 0.03
LEARNING_RATE, DECAY_FACTOR, EPOCHS_PER_DECAY = 0.2, 0.5, 12.5
AVERAGE_DECAY = 0.7  # neither this nor the momentum is a float32
MOMENTUM = 0.9


def network(features, training):
    def layer(name, inputs, units, regularizer=None):
        weights = v1.get_variable(f"{name}/weights", [inputs.shape[-1], units], inputs.dtype, regularizer=regularizer)
        return inputs @ weights + v1.get_variable(f"{name}/biases", [units], inputs.dtype, v1.zeros_initializer())

    hidden = layer("hidden", features, HIDDEN, lambda weights: WEIGHT_DECAY * tf.nn.l2_loss(weights))
    return layer("output", tf.tanh(hidden), CLASSES)


WORKLOAD = Workload("dense", examples=None, inference=network)


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=[NUM_EXAMPLES, FEATURES]), rng.integers(0, CLASSES, NUM_EXAMPLES)


@pytest.mark.parametrize(
    ("optimizer", "num_towers", "decay"),
    [
        ("sgd", 1, 0.1),
        ("momentum", 2, None),
        ("adam", 4, None),
        ("momentum", 8, 0.1),
        ("adamw", 2, None),
        ("adam", 1, 0.2),
    ],
)
def test_training_is_the_arithmetic_of_numpy(open_training, optimizer, num_towers, decay):
    features, labels = data()
    with open_training(
        WORKLOAD, Examples.from_arrays("random", features, labels), dtype="float64", optimizer=optimizer,
        num_gpus=num_towers, batch_size=NUM_EXAMPLES // num_towers,
        learning_rate=LEARNING_RATE, learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY,
        ema=AVERAGE_DECAY, weight_decay=decay,
    ) as (built, session):  # fmt: skip
        variables = {variable.op.name: variable for variable in built.saved.variables}
        initial = session.run(variables)
        reports, states = [], []
        for _ in range(STEPS):
            reports.append(session.run(built.report))
            states.append(session.run(variables))

    weights = {name: initial[name] for name in ("hidden/weights", "hidden/biases", "output/weights", "output/biases")}
    decoupled = decay or (0.004 if optimizer == "adamw" else 0)  # keras.optimizers.AdamW's

    def update(weights, slots, gradients, rate):
        for name in ("hidden/weights", "output/weights"):
            weights[name] = weights[name] * (1 - rate * decoupled)
        {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw": adam}[optimizer](weights, slots, gradients, rate)

    losses, rates, expected = train(weights, features, labels, update)
    np.testing.assert_allclose([report.learning_rate for report in reports], rates, rtol=1e-15)
    np.testing.assert_allclose([report.loss for report in reports], losses, rtol=1e-9)
    for state, values in zip(states, expected, strict=True):
        assert state.keys() == values.keys() | {"global_step", "examples_seen"}
        for name, value in values.items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-9 * np.max(np.abs(value)), err_msg=name)
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    assert [report.examples for report in reports] == [NUM_EXAMPLES * step for step in range(1, STEPS + 1)]


def train(weights, features, labels, update):
    """Returns over steps: the losses, the learning rates, {name: value} of weights, slots and averages."""
    weights, slots = dict(weights), {}
    averages = dict(weights)
    losses, rates, states = [], [], []
    for step in range(STEPS):
        loss, gradients = loss_and_gradients(weights, features, labels)
        decays = step * NUM_EXAMPLES // int(EPOCHS_PER_DECAY * NUM_EXAMPLES)
        rate = LEARNING_RATE * DECAY_FACTOR**decays
        update(weights, slots, gradients, rate)
        decay = min(AVERAGE_DECAY, (1 + step) / (10 + step))
        averages = {name: decay * averages[name] + (1 - decay) * weights[name] for name in weights}
        losses.append(loss)
        rates.append(rate)
        states.append(weights | slots | {f"{name}/ExponentialMovingAverage": averages[name] for name in weights})
    return losses, rates, states


def loss_and_gradients(weights, features, labels):
    """Mean cross-entropy plus decay * ||hidden weights||^2 / 2, and its gradients by backpropagation."""
    hidden = np.tanh(features @ weights["hidden/weights"] + weights["hidden/biases"])
    logits = hidden @ weights["output/weights"] + weights["output/biases"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    loss += WEIGHT_DECAY * np.sum(weights["hidden/weights"] ** 2) / 2

    d_logits = (probabilities - np.eye(CLASSES)[labels]) / len(labels)
    d_hidden = d_logits @ weights["output/weights"].T * (1 - hidden**2)
    return loss, {
        "hidden/weights": features.T @ d_hidden + WEIGHT_DECAY * weights["hidden/weights"],
        "hidden/biases": d_hidden.sum(axis=0),
        "output/weights": hidden.T @ d_logits,
        "output/biases": d_logits.sum(axis=0),
    }


def sgd(weights, slots, gradients, rate):
    for name, gradient in gradients.items():
        weights[name] = weights[name] - rate * gradient


def momentum(weights, slots, gradients, rate):
    for name, gradient in gradients.items():
        slot = f"{name}/Momentum"
        slots[slot] = MOMENTUM * slots.get(slot, 0) + gradient
        weights[name] = weights[name] - rate * slots[slot]


def adam(weights, slots, gradients, rate):
    """Kingma & Ba 2015, as at the end of its section 2."""
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    power1 = slots.setdefault("beta1_power", beta1)
    power2 = slots.setdefault("beta2_power", beta2)
    step_size = rate * np.sqrt(1 - power2) / (1 - power1)
    for name, gradient in gradients.items():
        first, second = f"{name}/Adam", f"{name}/Adam_1"
        slots[first] = beta1 * slots.get(first, 0) + (1 - beta1) * gradient
        slots[second] = beta2 * slots.get(second, 0) + (1 - beta2) * gradient**2
        weights[name] = weights[name] - step_size * slots[first] / (np.sqrt(slots[second]) + epsilon)
    slots["beta1_power"], slots["beta2_power"] = power1 * beta1, power2 * beta2
