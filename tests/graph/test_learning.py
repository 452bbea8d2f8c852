"""layers.param_group: rates of single variables, for every optimizer and way to update, against numpy."""

import numpy as np
import pytest
import tensorflow as tf
import trainings

from tower_train import errors, layers
from tower_train.graph import optimizers
from tower_train.workload import DataRequest, Examples, Workload

v1 = tf.compat.v1
EXAMPLES, BATCH, STEPS = 48, 8, 9  # six steps an epoch
DECAY = 0.125
RATE = 0.02
FACTORS = {"usual": 1.0, "fast": 8.0, "early": 1.0, "both": 4.0, "bias": 8.0, "unlike": 1.0, "slow": 1.0}
UNTIL = {"early": 1.0, "both": 0.5}  # epochs


def load(request):
    rng = np.random.default_rng(0)
    return Examples.from_arrays("linear", rng.normal(1, 2, [EXAMPLES, 4]), rng.normal(size=[EXAMPLES, 3]))


def network(features, training):
    def times(name):
        return features @ v1.get_variable(
            name, [4, 3], features.dtype, regularizer=lambda kernel: DECAY * tf.nn.l2_loss(kernel)
        )

    outputs = times("usual")
    with layers.param_group(rate_factor=8.0):
        outputs += times("fast") + v1.get_variable("bias", [3], features.dtype, v1.zeros_initializer())
        with layers.param_group(0.5, until_epoch=0.5), layers.param_group(until_epoch=2):
            outputs += times("both")
    with layers.param_group(muon=False):
        outputs += times("unlike")
    with layers.param_group(momentum=0.25), layers.param_group(momentum=0.6):
        outputs += times("slow")
    with layers.param_group(until_epoch=1):
        return outputs + times("early")


def squared_error(outputs, labels):
    return tf.reduce_mean(tf.reduce_sum(tf.square(outputs - labels), axis=1))


WORKLOAD = Workload("linear", load, network, squared_error)


def gradients(weights, x, y):
    """Of the loss and the weight decay."""
    outputs = weights["bias"] + sum(x @ w for name, w in weights.items() if name != "bias")
    residual = 2 * (outputs - y) / len(x)
    return {name: residual.sum(0) if name == "bias" else x.T @ residual + DECAY * w for name, w in weights.items()}


class Sgd:
    def move(self, name, weight, gradient):
        """The weight's move at rate 1."""
        return gradient


class Momentum(Sgd):
    def __init__(self, nesterov=False):
        self.velocity, self.nesterov = {}, nesterov

    def move(self, name, weight, gradient):
        momentum = 0.6 if name == "slow" else 0.7
        velocity = self.velocity[name] = momentum * self.velocity.get(name, 0) + gradient
        return gradient + momentum * velocity if self.nesterov else velocity


class Muon(Momentum):
    """Momentum, whose singular values the polynomial of Jordan's Newton-Schulz iteration changes."""

    def move(self, name, weight, gradient):
        moved = super().move(name, weight, gradient)
        if name in ("bias", "unlike"):
            return moved
        left, values, right = np.linalg.svd(moved, full_matrices=False)
        values /= np.linalg.norm(values) + 1e-7
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        return left * values @ right


class Adam(Sgd):
    """Kingma and Ba 2015, the form before section 2.1."""

    BETAS = 0.9, 0.999

    def __init__(self):
        self.first, self.second, self.steps = {}, {}, {}

    def move(self, name, weight, gradient):
        beta1, beta2 = self.BETAS
        steps = self.steps[name] = self.steps.get(name, 0) + 1
        first = self.first[name] = beta1 * self.first.get(name, 0) + (1 - beta1) * gradient
        second = self.second[name] = beta2 * self.second.get(name, 0) + (1 - beta2) * gradient**2
        return np.sqrt(1 - beta2**steps) / (1 - beta1**steps) * first / (np.sqrt(second) + 1e-8)


OPTIMIZERS = {
    "sgd": (Sgd, dict(optimizer="sgd")),
    "momentum": (Momentum, dict(optimizer="momentum")),
    "nesterov": (lambda: Momentum(nesterov=True), dict(optimizer="momentum", nesterov=True)),
    "muon": (Muon, dict(optimizer="muon")),
    "muon, nesterov": (lambda: Muon(nesterov=True), dict(optimizer="muon", nesterov=True)),
    "adam": (Adam, dict(optimizer="adam")),
}


ONE, MIRRORED = dict(num_gpus=1), dict(num_gpus=2, variable_update="mirrored")
ACCUMULATING = dict(num_gpus=2, accumulate_steps=2)


@pytest.mark.parametrize(
    ("optimizer", "towers"),
    [*((name, ONE) for name in OPTIMIZERS), ("adam", MIRRORED), ("muon", MIRRORED), ("adam", ACCUMULATING)],
)
def test_every_variable_moves_at_its_own_rate(open_training, optimizer, towers):
    make, options = OPTIMIZERS[optimizer]
    options = options | towers | dict(batch_size=BATCH // towers["num_gpus"] // towers.get("accumulate_steps", 1))
    options |= dict(momentum=0.7) if options["optimizer"] in ("momentum", "muon") else {}
    workload, seen = trainings.noting(WORKLOAD)
    rule, expected = make(), None
    with open_training(
        workload, load(DataRequest("train")), dtype="float64", learning_rate=RATE,
        ema=0.0, **options,
    ) as (built, session):  # fmt: skip
        variables = {name: next(v for v in built.saved.variables if v.op.name == name) for name in FACTORS}
        expected = session.run(variables)
        for step in range(STEPS):
            batches, report = session.run((seen, built.report))
            assert report.learning_rate == pytest.approx(RATE, rel=1e-12), "that of variables without a mark"
            moved = gradients(expected, np.concatenate(batches[::2]), np.concatenate(batches[1::2]))
            before, found = expected, session.run(variables)
            for name, gradient in moved.items():
                learning = step * BATCH / EXAMPLES < UNTIL.get(name, np.inf)
                move = RATE * FACTORS[name] * learning * rule.move(name, before[name], gradient)
                expected = expected | {name: before[name] - move}
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-11, err_msg=f"{name} {step}")
                assert np.array_equal(found[name], before[name]) != learning, (name, step)
            expected = found


@pytest.mark.parametrize(("shape", "factor"), [([2, 3], 1.5**0.5), ([3, 2], 1), ([2, 2, 3, 24], 2**0.5), ([3], None)])
def test_muon_moves_filters_as_matrices_of_inputs_and_outputs(shape, factor):
    """One step from no momentum: for enough iterations by U V^T of the gradient, times sqrt(outputs / inputs)."""
    gradient = np.random.default_rng(0).normal(size=shape)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("weights", initializer=np.zeros(shape), use_resource=True)
        moved = optimizers.Muon(tf.constant(0.5, tf.float64), 0.9, False, 5).apply_gradients([(gradient, variable)])
        session.run(v1.global_variables_initializer())
        session.run(moved)
        found = session.run(variable)
    if factor is None:
        return np.testing.assert_allclose(found, -0.5 * gradient)
    left, _, right = np.linalg.svd(gradient.reshape(-1, shape[-1]), full_matrices=False)
    along = np.diag(left.T @ -found.reshape(-1, shape[-1]) @ right.T) / (0.5 * factor)
    assert np.all((0.6 < along) & (along < 1.3)), along
    rebuilt = left * along @ right * -0.5 * factor
    np.testing.assert_allclose(found.reshape(-1, shape[-1]), rebuilt, atol=1e-12)


def test_all_that_optimizers_keep_is_named_as_without_marks():
    """But for Adam's powers of its betas, which each further group has: the same values."""
    plain = Workload("plain", load, lambda x, training: x @ v1.get_variable("usual", [4, 3], x.dtype), squared_error)
    options = dict(steps=2, dtype="float64", optimizer="adam", batch_size=8, ema=0.0)
    marked, usual = (trainings.train(workload, load(None), **options)[1] for workload in (WORKLOAD, plain))
    slots = {f"{name}{slot}" for name in FACTORS for slot in ("", "/Adam", "/Adam_1")}
    powers = {f"beta{beta}_power_{group}" for beta in (1, 2) for group in (1, 2, 3, 4, 5)}
    assert marked.keys() == usual.keys() | slots | powers
    for name in powers:
        assert marked[name] == marked[name.rpartition("_")[0]] < 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(rate_factor=0.0), "rate_factor=0.0, until_epoch=inf"),
        (dict(rate_factor=float("nan")), "rate_factor=nan"),
        (dict(rate_factor=float("inf")), "rate_factor=inf"),
        (dict(until_epoch=-1), "rate_factor=1.0, until_epoch=-1"),
        (dict(momentum=1.0), "momentum=1.0"),
    ],
)
def test_what_is_no_rate_is_refused(arguments, text):
    with pytest.raises(errors.GraphError, match=text), layers.param_group(**arguments):
        pass
