"""Training a small network is what numpy does, however the batch is cut: gradients, every optimizer, rates of single
variables, weight decay, clipping, smooth labels, schedule and averages.

A step's global batch is the whole data set, so that a step is an epoch and the order of the examples is of no account.
"""

import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train import layers
from tower_train.graph import optimizers
from tower_train.workload import Examples, Workload

v1 = tf.compat.v1

NUM_EXAMPLES, FEATURES, HIDDEN, CLASSES = 24, 6, 5, 3
STEPS = 50
WEIGHT_DECAY = 0.03
RATE, DECAY_FACTOR, EPOCHS_PER_DECAY = 0.01, 0.5, 12.5
AVERAGE_DECAY, MOMENTUM = 0.7, 0.85  # neither is a float32
# The rates of variables in blocks of layers.param_group, and the steps after which these end.
FACTORS = {"usual": 1, "fast": 8, "fast_bias": 8, "both": 4, "unlike": 1, "slow": 1, "early": 1, "output": 1, "bias": 1}
UNTIL = {"both": 7, "early": 30}
GROUPS = 5
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=[NUM_EXAMPLES, FEATURES]), RNG.integers(0, CLASSES, NUM_EXAMPLES)


def network(features, training):
    def weights(name, *shape):
        decay = (lambda kernel: WEIGHT_DECAY * tf.nn.l2_loss(kernel)) if shape[0] == FEATURES else None
        initializer = None if len(shape) > 1 else v1.zeros_initializer()
        return v1.get_variable(name, shape, features.dtype, initializer, decay)

    def times(name):
        return features @ weights(name, FEATURES, HIDDEN)

    hidden = times("usual")
    with layers.param_group(rate_factor=8.0):
        hidden += times("fast") + weights("fast_bias", HIDDEN)
        with layers.param_group(0.5, until_epoch=7), layers.param_group(until_epoch=20):
            hidden += times("both")
    with layers.param_group(muon=False):
        hidden += times("unlike")
    with layers.param_group(momentum=0.25), layers.param_group(momentum=0.6):
        hidden += times("slow")
    with layers.param_group(until_epoch=30):
        hidden += times("early")
    return tf.tanh(hidden) @ weights("output", HIDDEN, CLASSES) + weights("bias", CLASSES)


class Sgd:
    """{name: its move at rate 1} and the slots of an optimizer."""

    def __init__(self, **options):
        self.slots, self.options = {}, options

    def move(self, name, gradient):
        return gradient

    def end_step(self):
        pass


class Momentum(Sgd):
    def move(self, name, gradient):
        momentum, slot = 0.6 if name == "slow" else MOMENTUM, f"{name}/Momentum"
        velocity = self.slots[slot] = momentum * self.slots.get(slot, 0) + gradient
        return gradient + momentum * velocity if "nesterov" in self.options else velocity


class Muon(Momentum):
    """Momentum, whose singular values the polynomial of Jordan's Newton-Schulz iteration changes."""

    def move(self, name, gradient):
        moved = super().move(name, gradient)
        if name == "unlike" or moved.ndim < 2:
            return moved
        left, values, right = np.linalg.svd(moved, full_matrices=False)
        values /= np.linalg.norm(values) + 1e-7
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        return left * values @ right * max(1, moved.shape[1] / moved.shape[0]) ** 0.5


class Adam(Sgd):
    """Kingma and Ba 2015, as at the end of section 2."""

    BETAS = 0.9, 0.999

    def __init__(self, **options):
        super().__init__(**options)
        self.slots = {
            f"beta{i}_power{group}": beta
            for i, beta in enumerate(self.BETAS, 1)
            for group in ("", *(f"_{i}" for i in range(1, GROUPS + 1)))
        }

    def move(self, name, gradient):
        slots, (beta1, beta2), (first, second) = self.slots, self.BETAS, (f"{name}/Adam", f"{name}/Adam_1")
        slots[first] = beta1 * slots.get(first, 0) + (1 - beta1) * gradient
        slots[second] = beta2 * slots.get(second, 0) + (1 - beta2) * gradient**2
        size = np.sqrt(1 - slots["beta2_power"]) / (1 - slots["beta1_power"])
        return size * slots[first] / (np.sqrt(slots[second]) + 1e-8)

    def end_step(self):
        for name in self.slots:
            if "_power" in name:
                self.slots[name] *= self.BETAS[int(name[4]) - 1]


def loss_and_gradients(weights, smoothing):
    """Mean cross-entropy, of which a share is for all classes alike, plus decay * ||hidden weights||^2 / 2, and its
    gradients by backpropagation."""
    kernels = [name for name, value in weights.items() if len(value) == FEATURES]
    hidden = np.tanh(sum(X @ weights[name] for name in kernels) + weights["fast_bias"])
    logits = hidden @ weights["output"] + weights["bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    targets = (1 - smoothing) * np.eye(CLASSES)[LABELS] + smoothing / CLASSES
    loss = -np.sum(targets * np.log(probabilities)) / NUM_EXAMPLES
    d_logits = (probabilities - targets) / NUM_EXAMPLES
    d_hidden = d_logits @ weights["output"].T * (1 - hidden**2)
    gradients = {name: X.T @ d_hidden + WEIGHT_DECAY * weights[name] for name in kernels}
    gradients |= dict(fast_bias=d_hidden.sum(0), output=hidden.T @ d_logits, bias=d_logits.sum(0))
    return loss + sum(WEIGHT_DECAY / 2 * np.sum(weights[name] ** 2) for name in kernels), gradients


def train(weights, rule, weight_decay, clip_gradients=np.inf, label_smoothing=0.0):
    """Returns over steps: the losses, the learning rates, {name: value} of weights, slots and averages."""
    averages, losses, rates, states = dict(weights), [], [], []
    for step in range(STEPS):
        loss, gradients = loss_and_gradients(weights, label_smoothing)
        norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
        rate = RATE * DECAY_FACTOR ** (step * NUM_EXAMPLES // int(EPOCHS_PER_DECAY * NUM_EXAMPLES))
        for name, gradient in gradients.items():
            own = rate * FACTORS[name] * (step < UNTIL.get(name, STEPS))
            decayed = weights[name] * (1 - own * weight_decay * (gradient.ndim > 1))
            weights = weights | {name: decayed - own * rule.move(name, gradient * min(1, clip_gradients / norm))}
        rule.end_step()
        decay = min(AVERAGE_DECAY, (1 + step) / (10 + step))
        averages = {name: decay * averages[name] + (1 - decay) * weights[name] for name in weights}
        losses.append(loss)
        rates.append(rate)
        states.append(weights | rule.slots | {f"{name}/ExponentialMovingAverage": averages[name] for name in weights})
    return losses, rates, states


MIRRORED, IN_TURN = dict(variable_update="mirrored"), dict(accumulate_steps=2)


@pytest.mark.parametrize(
    ("rule", "towers", "options"),
    [
        (Sgd, 1, dict(optimizer="sgd", weight_decay=0.1)),
        (Sgd, 2, dict(optimizer="sgd", clip_gradients=0.75) | MIRRORED),
        (Momentum, 2, dict(optimizer="momentum") | IN_TURN),
        (Momentum, 8, dict(optimizer="momentum", weight_decay=0.1, label_smoothing=0.3)),
        (Momentum, 1, dict(optimizer="momentum", nesterov=True)),
        (Muon, 2, dict(optimizer="muon") | MIRRORED),
        (Muon, 4, dict(optimizer="muon", nesterov=True)),
        (Adam, 2, dict(optimizer="adam") | MIRRORED),
        (Adam, 2, dict(optimizer="adam", weight_decay=0.2) | IN_TURN),
        (Adam, 3, dict(optimizer="adamw")),  # by default with the decay of keras.optimizers.AdamW
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_training_is_the_arithmetic_of_numpy(rule, towers, options):
    batch = NUM_EXAMPLES // towers // options.get("accumulate_steps", 1)
    momentum = dict(momentum=MOMENTUM) if issubclass(rule, Momentum) else {}
    given = dict(dtype="float64", num_gpus=towers, batch_size=batch, ema=AVERAGE_DECAY) | momentum | options
    given |= dict(learning_rate=RATE, learning_rate_decay_factor=DECAY_FACTOR, num_epochs_per_decay=EPOCHS_PER_DECAY)
    examples = Examples.from_arrays("random", X, LABELS)
    with trainings.opened(Workload("dense", None, network), examples, **given) as (built, session):
        variables = {variable.op.name: variable for variable in built.saved.variables}
        weights = session.run({name: variables[name] for name in FACTORS})
        found, states = [], []
        for _ in range(STEPS):
            found.append(session.run(built.report))
            states.append(session.run(variables))
    decay = options.get("weight_decay", 0.004 if options["optimizer"] == "adamw" else 0)
    losses, rates, expected = train(
        weights, rule(**options), decay, options.get("clip_gradients", np.inf), options.get("label_smoothing", 0.0)
    )
    np.testing.assert_allclose([report.learning_rate for report in found], rates, rtol=1e-15)
    np.testing.assert_allclose([report.loss for report in found], losses, rtol=1e-9)
    for state, values in zip(states, expected, strict=True):
        assert state.keys() == values.keys() | {"global_step", "examples_seen"}
        for name, value in values.items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-9 * np.max(np.abs(value)), err_msg=name)
    assert [report.step for report in found] == list(range(1, STEPS + 1))
    assert [report.examples for report in found] == [NUM_EXAMPLES * step for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(("shape", "factor"), [([2, 3], 1.5**0.5), ([3, 2], 1), ([2, 2, 3, 24], 2**0.5)])
def test_muon_moves_filters_as_matrices_of_inputs_and_outputs(shape, factor):
    """One step from no momentum: for enough iterations by U V^T of the gradient, times sqrt(outputs / inputs)."""
    gradient = np.random.default_rng(0).normal(size=shape)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("weights", initializer=np.zeros(shape), use_resource=True)
        moved = optimizers.Muon(tf.constant(0.5, tf.float64), 0.9, False, 5).apply_gradients([(gradient, variable)])
        session.run(v1.global_variables_initializer())
        session.run(moved)
        found = session.run(variable)
    left, _, right = np.linalg.svd(gradient.reshape(-1, shape[-1]), full_matrices=False)
    along = np.diag(left.T @ -found.reshape(-1, shape[-1]) @ right.T) / (0.5 * factor)
    assert np.all((0.6 < along) & (along < 1.3)), along
    rebuilt = left * along @ right * -0.5 * factor
    np.testing.assert_allclose(found.reshape(-1, shape[-1]), rebuilt, atol=1e-12)
