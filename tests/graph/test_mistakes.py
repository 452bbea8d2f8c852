"""Networks and options that break a rule of the towers: each is one line that names what, and says what to do.
Operations with a random state of their own where they are allowed."""

import dataclasses
import re

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
import trainings

from tower_train import Examples, Workload, errors, layers
from tower_train.data import tf_data
from tower_train.graph import random_state
from tower_train.workload import DataRequest

v1 = tf.compat.v1
TOY = toy_workload.WORKLOAD
EXAMPLES = dataclasses.replace(toy_workload.load(DataRequest("train")), name="few")
TWO, MIRRORED = dict(num_gpus=2), dict(num_gpus=2, variable_update="mirrored")
GRAPH, CONFIG = errors.GraphError, errors.ConfigError


def weights(x, name="w", **kwargs):
    return x @ v1.get_variable(name, [4, 3], x.dtype, **kwargs)


def noted_again(x):
    """Tower 0 normalises each twice, the others once."""
    v1.add_to_collection("calls", 1)
    for reuse in [False, True][: 3 - len(v1.get_collection("calls"))]:
        with v1.variable_scope("", reuse=reuse or None):
            for name in ("b", "a"):
                x = layers.batch_normalization(x, True, name=name)
    return weights(x)


def later(x):
    v1.add_to_collection("calls", 1)
    return weights(x, f"layer_{len(v1.get_collection('calls'))}")


def got_elsewhere(x):
    if not v1.trainable_variables():
        got_elsewhere.scale = tf.Variable(1.0, name="scale", dtype=x.dtype)
    return weights(x) * got_elsewhere.scale


def forgotten(x):
    v1.losses.add_loss(tf.reduce_mean(x**2, name="penalty"))
    return weights(x)


def traced():
    return tf.function(lambda x: layers.dropout(x, 0.5, True))


def in_group(**arguments):
    def network(x):
        with layers.param_group(**arguments):
            return weights(x)

    return network


def drawing(draw):
    return lambda x: weights(x) + 0 * tf.reduce_sum(draw())


def pooled(x, seed=0):
    """With a seed it draws the same regions each time."""
    return tf.nn.fractional_max_pool(tf.tile(x, [1, 2])[:, :, None, None], [1, 2, 1, 1], seed=seed)[0][:, :, 0, 0]


def recurrent(dropout):
    state = tf.zeros([1, 8, 4])
    return tf.raw_ops.CudnnRNNV3(
        input=tf.ones([5, 8, 4]),
        input_h=state,
        input_c=state,
        params=tf.ones([160]),
        sequence_lengths=[5] * 8,
        dropout=dropout,
    ).output


NETWORKS = {  # {what: (network, options, words of the GraphError)}
    "another variable later": (later, TWO, "^tower_1 would create the variable 'layer_2'"),
    "tf.Variable": (lambda x: x @ tf.Variable(tf.ones([4, 3]), name="k"), TWO, "^tower_1 would create .*'k'.*get_var"),
    "a Keras layer, of every tower": (lambda x: keras.layers.Dense(4)(x), TWO, "the variable 'kernel'.*keras_network"),
    "a Keras layer, mirrored": (lambda x: keras.layers.Dense(4)(x), MIRRORED, "kernel cannot be .*keras_network"),
    "tf.Variable, mirrored": (got_elsewhere, MIRRORED, "scale cannot be mirrored: .* --variable_update=cpu"),
    "other statistics": (noted_again, TWO, "alike: b/moving_mean, b/moving_variance, a/moving_mean, a/mov"),
    "a loss that is collected only": (forgotten, {}, r"^penalty \(test_mistakes.py:\d+\) is in .*LOSSES, but not part"),
    "a factor of 0": (in_group(rate_factor=0.0), {}, "rate_factor=0.0, until_epoch=inf"),
    "a factor of NaN": (in_group(rate_factor=float("nan")), {}, "rate_factor=nan"),
    "an epoch before the first": (in_group(until_epoch=-1), {}, "rate_factor=1.0, until_epoch=-1"),
    "a momentum of 1": (in_group(momentum=1.0), {}, "momentum=1.0"),
    # Draws that belong to no example.
    "a rate of 1": (drawing(lambda: layers.dropout(tf.ones([8, 2]), 1.0, True)), {}, r"dropout\(rate=1.0\): the rate"),
    "24 rows": (drawing(lambda: layers.random_normal([24], name="a")), {}, "a draws .* 24 rows .* where a row is"),
    "no rows": (drawing(lambda: layers.random_uniform([])), {}, "no rows for the tower's 8 examples"),
    "unknown rows": (drawing(lambda: layers.dropout(v1.placeholder(tf.float32, [None]), 0.5, True)), {}, "an unknown"),
    "recomputed": (
        lambda x: tf.recompute_grad(lambda x: layers.dropout(x, 0.5, True))(weights(x)),
        {},
        "dropout draws again in the backward pass, as tf.recompute_grad",
    ),
    "traced": ((lambda dropped: lambda x: dropped(weights(x)))(traced()), TWO, "compute alike: dropout. Let each call"),
    # Operations with a random state of their own: name, line and what to use.
    "tf.nn.dropout": (
        lambda x: weights(tf.nn.dropout(x, 0.5)),
        {},
        r"^workload mine: dropout/\S+ \(RandomUniform, test_mistakes.py:\d+\) would keep .* Use "
        r"tower_train.layers.dropout, random_uniform .* --allow_stateful_random",
    ),
    "seeded": (lambda x: weights(x + tf.random.normal([8, 4], seed=1)), {}, "RandomStandardNormal, .* Use .*random_n"),
    "in cond": (
        lambda x: weights(tf.cond(x[0, 0] > 0, lambda: tf.nn.dropout(x, 0.5), lambda: x)),
        {},
        r"cond \(Random",
    ),
    "in map_fn": (lambda x: tf.map_fn(lambda row: row + tf.random.uniform([]), weights(x)), {}, r"while \(RandomUnif"),
    "two": (lambda x: weights(tf.nn.dropout(tf.nn.dropout(x, 0.5), 0.5)), {}, r"\) and 1 more would keep"),
    "categorical": (lambda x: weights(x + tf.cast(tf.random.categorical(x, 1), x.dtype)), {}, "Multinomial.*random_u"),
    "a pool": (lambda x: weights(pooled(x)), {}, "FractionalMaxPool"),
    "cuDNN's": (drawing(lambda: recurrent(0.5)), {}, "CudnnRNNV3"),
    "a generator": (lambda x: weights(x + tf.random.Generator.from_seed(1).normal([8, 4])), {}, "RngReadAndSkip"),
}


@pytest.mark.parametrize(("network", "options", "words"), NETWORKS.values(), ids=NETWORKS)
def test_a_network_that_breaks_a_rule_is_one_line(network, options, words):
    workload = dataclasses.replace(TOY, name="mine", inference=lambda features, training: network(features))
    with pytest.raises(GRAPH, match=words) as raised:
        trainings.train(workload, EXAMPLES, 0, batch_size=8, **options)
    assert "\n" not in str(raised.value)


def test_what_is_traced_once_in_one_tower_and_stateless_numbers_are_allowed():
    def network(features, training):
        projection = tf.random.stateless_normal([4, 4], [1, 2], dtype=features.dtype)
        return dropped(weights(pooled(features @ projection, seed=1), initializer=v1.truncated_normal_initializer()))

    dropped = traced()
    trainings.train(dataclasses.replace(TOY, inference=network), EXAMPLES, 0)
    with tf.Graph().as_default():
        assert [*random_state.find([recurrent(0.0).op])] == []


def with_labels(labels, **fields):
    return dataclasses.replace(EXAMPLES, labels=labels, **fields)


IN_ORDER = tf_data.examples("mine", lambda: tf.data.Dataset.from_tensor_slices(2 * (np.zeros(9),)).repeat(), 9)
SIGNS = np.array([-1, 1] * 48)


def fetching(labels):
    """Examples that a user's own reader gives, of classes a and b."""
    return Examples("few", 9, lambda: lambda rows: (tf.ones([8, 4]), labels(tf.ones([8]))), class_names=("a", "b"))


NO_CLASS = "CLASS:WEIGHT, a class of few.*The classes are one, two, three"
BALANCED = dict(class_weight="balanced")


def wrong(kind, words, fields=(), examples=EXAMPLES, **options):
    return kind, words, dict(fields), examples, options


OTHERS = {  # {what: (class, words, fields of the workload, examples, options)}
    "a loss of one's own, smoothed": wrong(
        CONFIG,
        "=0.5: workload toy has a loss of its own",
        dict(loss=lambda o, y: tf.reduce_mean(o)),
        label_smoothing=0.5,
    ),
    "a loss the other way around": wrong(
        GRAPH,
        r"loss takes y_true first. Let it be a function of \(outputs, labels\)",
        dict(loss=lambda y_true, y_pred: tf.reduce_mean(y_pred)),
    ),
    **{f"class_weight={text}": wrong(CONFIG, NO_CLASS, class_weight=text) for text in ("never:2", "3:1", "0:-1", "0")},
    "weights of unknown classes": wrong(
        CONFIG, "the classes of few are not at hand", examples=with_labels(None), **BALANCED
    ),
    **{
        f"weights of classes, and {what}": wrong(GRAPH, "are no classes", examples=fetching(labels), class_weight="a:2")
        for what, labels in (("numbers", tf.zeros_like), ("one-hot", lambda rows: tf.ones([8, 2], tf.int64)))
    },
    "weights of signs": wrong(
        CONFIG, "few has the label -1. Classes are numbered", examples=with_labels(SIGNS, class_names=()), **BALANCED
    ),
    "batches of a changing number of workers": wrong(
        CONFIG,
        "--elastic=1:1: workload toy normalises .*batch_norm=tower",
        dict(inference=lambda x, training: layers.batch_normalization(x, training) @ tf.ones([4, 3], x.dtype)),
        elastic="1:1",
        train_dir="x",
    ),
    "a variable in parts": wrong(
        GRAPH,
        "t has a partitioner: each copy of a variable is whole",
        dict(inference=lambda x, _: v1.get_variable("t", [4, 3], partitioner=v1.fixed_size_partitioner(2))),
    ),
    "NCCL on CPUs": wrong(CONFIG, "--all_reduce=nccl is for GPUs, but .*/cpu:1", **MIRRORED, all_reduce="nccl"),
    "one copy to compare": wrong(
        CONFIG, "s=5: there is one copy", **TWO, variable_update="cpu", check_mirrors_every_steps=5
    ),
    **{
        f"an augmentation with a state, on the {place}": wrong(
            GRAPH,
            f"{where}.*RandomStandardNormal, .* `augment` the draws that it is given",
            dict(augment=lambda x, draws: x + tf.random.normal(tf.shape(x))),
            augment_on=place,
        )
        for place, where in (("host", "Dataset"), ("device", "workload toy: preprocess/"))
    },
    "draws by an index that is not there": wrong(
        GRAPH,
        r"^draws.per_example\('flip'\): .* Use draws.uniform, or",
        dict(augment=lambda x, draws: x + draws.per_example("flip", 1)[:, 0]),
        IN_ORDER,
        batch_size=3,
    ),
    "pairs of an odd batch": wrong(
        CONFIG, "mixes .* in pairs, and 3 per", dict(mix=lambda x, y, draws: (x, y)), batch_size=3
    ),
}


@pytest.mark.parametrize(("kind", "words", "fields", "examples", "options"), OTHERS.values(), ids=OTHERS)
def test_a_workload_or_an_option_that_cannot_be_is_one_line(kind, words, fields, examples, options):
    workload = dataclasses.replace(TOY, **fields)
    with pytest.raises(kind, match=words) as raised:
        trainings.train(workload, examples, 0, **(dict(batch_size=8) | options))
    assert "\n" not in str(raised.value)


def toy(change):
    def network(features, training):
        hidden = change(toy_workload.layer("hidden", features, 8))
        return toy_workload.layer("softmax_linear", hidden, 3)

    return Workload("changed", toy_workload.load, network)


def test_the_option_trains_all_the_same_and_log_and_run_json_tell(tmp_path, capsys):
    workload = toy(lambda x: tf.nn.dropout(x, 0.5))
    jobs.train_toy(tmp_path, workload=workload, max_steps=1, allow_stateful_random=True)
    output, run = capsys.readouterr().out, jobs.read_json(tmp_path, "run.json")
    [line] = re.findall(r"^\*\*\* --allow_stateful_random: several towers .*$", output, re.MULTILINE)
    assert re.search(r"dropout/\S+ \(RandomUniform, test_mistakes.py:\d+\)\.$", line)
    assert run["config"]["allow_stateful_random"] is True
    with pytest.raises(errors.GraphError, match="Use tower_train.layers.dropout"):
        jobs.train_toy(tmp_path, workload=workload, max_steps=2)
