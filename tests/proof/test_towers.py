"""N towers are shown to be one on a network of the user's own, or the first operation that differs is named."""

import re
import sys
import types

import jobs
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings
from toy_workload import layer
from toy_workload import network as plain

import cifar10
from tower_train import Config, Workload, errors, layers
from tower_train.proof import comparison, towers
from tower_train.run import plan
from tower_train.workload import DataRequest
from tower_train.workloads import image_folder

EXAMPLES = toy_workload.load(DataRequest("train"))
MIRRORED, IN_TURN = dict(variable_update="mirrored"), dict(num_gpus=1, accumulate_steps=2)


def compared(inference, loss=None, **options):
    """The comparison of a small workload's towers with one, as at the start of a run."""
    workload = Workload("small", lambda _: EXAMPLES, inference, **({"loss": loss} if loss else {}))
    return trainings.compared(workload, EXAMPLES, **dict(batch_size=8) | options)


def linear(features, training):
    return layer("out", features, 3)


def normalized(features, training):
    hidden = layers.batch_normalization(layer("a", features, 3), training)
    return layers.dropout(hidden, 0.5, training)


def with_others(features, training):
    """With a variable that the loss does not see, and one of another dtype."""
    tf.compat.v1.get_variable("unseen", [2])
    rate = tf.compat.v1.get_variable("rate", [], tf.float32, tf.ones_initializer())
    return plain(features, training) * tf.cast(rate, features.dtype)


def kinked(features, training):
    """In float32, with a kernel whose roundings are few, but more with fewer examples, and a kink among them."""
    bend = tf.compat.v1.get_variable("bend", [], tf.float32, tf.ones_initializer())
    rounding = 2.0**-23
    lesser = 20 * rounding if features.shape[0] == 4 else 0.0
    bent = tf.nn.relu(bend * (1 + lesser) - (1 + 8 * rounding))
    return plain(tf.cast(features, tf.float32), training) + [1e-3, 0, 0] * bent


@pytest.mark.parametrize(
    ("inference", "options", "dtype", "least", "mode"),
    [
        (plain, MIRRORED | dict(dtype="bfloat16", optimizer="adam"), "float64", 1e-14, ("mirrored", 2, 1)),
        (plain, MIRRORED | IN_TURN, "float64", 1e-14, ("cpu", 1, 2)),
        (with_others, {}, "float32", 1e-5, ("cpu", 2, 1)),
        (kinked, dict(batch_size=4), "float32", 1e-3, ("cpu", 2, 1)),
    ],
)
def test_towers_that_are_one_are_shown_to_be_in_the_runs_own_mode(inference, options, dtype, least, mode, monkeypatch):
    built, build = [], towers.Trial
    monkeypatch.setattr(towers, "Trial", lambda *args: built.append(args[2]) or build(*args))
    outcome = compared(inference, **options)
    modes = [(each.variable_update, each.num_gpus, each.accumulate_steps) for each in built]
    assert modes[0] == ("cpu", 1, 1) and modes[-1] == mode
    assert outcome.line.startswith("towers:   2 equal 1 on this network to ")
    assert f" (2 steps of 8 examples, {dtype}" in outcome.line
    assert outcome.relative < least and outcome.towers == 2 and not outcome.differs


def test_a_gradient_of_nothing_but_roundings_is_no_difference():
    """Of a bias that softmax does not see, behind weights of zeros, which no rounding of weights reaches."""

    def shifted(features, training):
        zeros = tf.compat.v1.zeros_initializer()
        weights = tf.compat.v1.get_variable("weights", [features.shape[1], 3], tf.float32, zeros)
        shift = tf.compat.v1.get_variable("shift", [1], tf.float32, zeros)
        return tf.cast(features, tf.float32) @ weights + shift

    assert not compared(shifted, optimizer="adam").differs


def test_batches_that_are_normalised_in_turn_are_compared_with_as_many_of_one_tower():
    line = compared(normalized, normalizes=True, **IN_TURN).line
    assert "nothing to compare: there is one, whose 2 batches of a step" in line
    outcome = compared(normalized, normalizes=True, accumulate_steps=2, variable_update="mirrored")
    assert outcome.relative < 1e-11 and not outcome.differs
    assert "   2 equal 1, each with 2 batches in turn, on this network to " in outcome.line
    assert "batch normalisation over all towers turn by turn" in outcome.line


def test_towers_that_normalise_by_themselves_are_not_said_to_equal_one():
    """With Adam, for which the gradient of a bias that is normalised, nothing but rounding, is a whole step."""
    outcome = compared(normalized, normalizes=True, batch_norm="tower", optimizer="adam")
    assert re.match(
        r"\*\*\* towers: 2 are not 1 with batch_norm=tower: .* differs by \de-0[123] on .* by \de-1\d with ",
        outcome.line,
    )
    assert outcome.relative < 1e-11 and not outcome.differs


def summed(logits, labels):
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def test_a_tensor_of_an_earlier_call_is_named():
    kept = []

    def network(features, training):
        kept.append(plain(features, training))
        return kept[-1] + tf.reduce_mean(kept[0])

    with pytest.raises(errors.GraphError, match="workload small: inference uses the tensor .* of an earlier call"):
        compared(network)


def test_a_large_network_is_announced_and_compared_in_float32_and_not_compiled(capsys, monkeypatch):
    numbers = 3 * (4 * 3 + 3) + 2  # weights, momenta, moving averages; counters of steps and examples
    monkeypatch.setattr(comparison.host, "free_memory", lambda: 64 * numbers - 1)
    monkeypatch.setattr(towers, "_MOST_COMPILED", 0)
    monkeypatch.setattr(comparison, "SECS_OF_NUMBER", 1)
    line = compared(linear, builds_run=True, jit_compile="always").line
    assert (
        "comparing 2 with 1, for about" in capsys.readouterr().out and ", float32, not compiled as the run is; " in line
    )
    assert line.endswith(f"In float64: {numbers} numbers in variables would take 0 GiB of memory")
    comparison.check_memory(numbers - 1, "float64")
    comparison.check_memory(2 * numbers - 1, "float32")


def test_a_sum_is_no_rounding_of_bfloat16_nor_a_matter_of_what_is_normalised_and_can_be_allowed():
    def coarse(features, training):
        return tf.cast(tf.cast(linear(features, training), tf.bfloat16), features.dtype)

    for network in (coarse, normalized):
        outcome = compared(network, summed, allow_differences=True)
        assert outcome.line.startswith("*** 2 towers differ from 1 on this network: ") and outcome.relative > 0.1
        assert "the loss is a sum over the batch" in outcome.differs


def test_towers_that_a_run_compiles_are_compared_compiled():
    """XLA converts what is no int32 to another number than TensorFlow does."""

    def network(features, training):
        return linear(features + tf.cast(tf.cast(1e20 * features, tf.int32), features.dtype) / 2**32, training)

    outcome = compared(network, jit_compile="always")
    assert ", compiled; " in outcome.line and outcome.relative < 1e-11


def test_a_run_compares_once_for_a_number_of_towers_and_a_mode(tmp_path, capsys):
    def start(steps):
        jobs.train_toy(tmp_path, max_steps=steps, check_towers="auto")
        return capsys.readouterr().out.count("equal 1 on this network"), jobs.read_json(tmp_path, "run.json")

    said, begun = start(2)
    record = begun["compared_with_one_tower"]
    assert said == 1 and record["towers"] == 2 and record["relative"] < 1e-14 and not record["differs"]
    said, resumed = start(4)
    assert said == 0 and resumed["compared_with_one_tower"] == record

    settled = {name: value for name, value in resumed["config"].items() if name != "workload"}

    def compares(**options):
        start = types.SimpleNamespace(steps_done=4, before=resumed, config=Config(**settled | options))
        return plan.Plan.is_to_be_compared.fget(start)

    assert not compares() and not compares(num_gpus=1, accumulate_steps=2)
    assert compares(num_gpus=4) and compares(variable_update="mirrored") and compares(batch_norm="tower")


def test_when_towers_are_compared(monkeypatch):
    def is_due(path, **options):
        return towers.is_due(Config(**options), path)

    assert is_due("mine", num_gpus=2) and is_due(None, num_gpus=2) and is_due("cifar10s.mine", accumulate_steps=2)
    assert not is_due("mine", num_gpus=1) and is_due("cifar10", num_gpus=1, check_towers="2")
    assert not is_due(cifar10.__name__, num_gpus=2) and not is_due(image_folder.__name__, num_gpus=2)
    assert not is_due("mine", num_gpus=2, check_towers="never")
    monkeypatch.setitem(sys.modules, "cifar10", types.SimpleNamespace(__file__="/home/me/cifar10.py"))
    assert is_due("cifar10", num_gpus=2)  # the trainer's by its file, not its name


def test_a_comparison_that_fails_is_said_to_be_left_out_because_of_its_first_error():
    """That of float64: in other dtypes it may fail because of these."""

    def compare(dtype):
        raise ValueError(f"Cannot reshape {dtype}.")

    line = comparison.before_training(lambda: comparison.in_dtypes(["float64", "float32"], compare), "").line
    assert line == "*** towers: not compared with one device, as that fails: Cannot reshape float64"


# One rule of rounding for workloads, Keras models and Estimators.

ONE, EQUAL = np.ones(3), "towers:   2 equal 1 on this network to "


def outcome(one, several):
    """of trainings: (values that they begin with) -> the value of w after a step."""

    def training(value):
        return lambda begin: [
            comparison.Values({}, {}, {"v": ONE, "w": begin.get("w", ONE)}),
            comparison.Values({}, {}, {"v": ONE, "w": ONE * value(begin)}),
        ]

    compared_with = comparison.Comparison(
        training(one), training(several), ["v", "w"], np.dtype(np.float64), 2, "1 step", lambda *_: "It begins there."
    )
    return compared_with.outcome()


@pytest.mark.parametrize(
    ("one", "several", "nearby", "line"),
    [
        (2, 2 + 1e-15, [], f"{EQUAL}4e-16"),
        (2, 2.0001, [2, 2.00001], f"{EQUAL}5e-05"),
        (2, 2.001, [2, 2, 2.0002], f"{EQUAL}5e-04"),
        (2, 5, [2.1], "*** towers: several differ from one by 2e+00, as one does once its weights are rounded"),
        (2, 2.01, [2.00001], ""),
        (2, 2.01, [2, 2, 2.001], ""),  # further from the weights, less is explained
        (2, np.nan, [2.00001], ""),
        (1, 1, [], "*** towers: nothing to compare: every gradient of the loss is 0"),
        (np.nan, 2, [], "*** towers: nothing to compare: the loss is not finite, or its gradients"),
        (np.nan, np.nan, [], "*** towers: nothing to compare: the loss is not finite, or its gradients"),
    ],
)
def test_a_difference_is_told_if_rounding_explains_it_and_else_refused(one, several, nearby, line):
    after, last = iter(nearby), nearby[-1:]
    found = outcome(lambda begin: next(after, *last) if begin else one, lambda begin: several)
    if line:
        assert found.line.startswith(line) and not found.differs
    else:
        assert found.differs.startswith("2 towers differ from 1 on this network: w ")
        assert found.differs.endswith(" in step 1 (1 step).\nIt begins there.")


def test_of_what_draws_anew_each_time_no_difference_is_rounding():
    drawn = iter(np.arange(1, 20))
    assert outcome(lambda begin: next(drawn), lambda begin: 1.1).differs


def test_what_weight_decay_alone_changes_is_scaled():
    def is_scaled(before, after):
        return comparison.is_scaled(np.array(before), np.array(after))

    assert is_scaled([1, 2, 3], [1, 2, 3]) and is_scaled([1, 2, 3], [0.5, 1, 1.5])
    assert not is_scaled([1, 2, 3], [1, 2, 2]) and not is_scaled([0, 0], [1, 1])
    assert not is_scaled([2], [1]) and not is_scaled([1, 1], [0.5, 0.5])  # may be no factor
