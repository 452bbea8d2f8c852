"""Passes over the hardest examples, against numpy: what they hold, and what is trained, whole, resumed, in towers."""

import collections
import contextlib
import dataclasses
import shutil

import clusters
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import Config, Examples, Workload, errors, layers
from tower_train.run import training

v1 = tf.compat.v1
COUNT, BATCH, RATE, CLASSES, SMOOTHING = 50, 6, 0.5, 3, 0.2
EPOCH, SHARE, PASS, BEGIN, STEPS = 1.3, 0.5, 25, 65, 34  # passes of 25 from position 65 on, mostly within a step
RNG = np.random.default_rng(0)
LABELS = np.arange(COUNT) % CLASSES
FEATURES = RNG.normal(LABELS[:, np.newaxis], 1.0, [COUNT, 4])


def load(request):
    if request.split != "train":
        return None
    numbered = np.concatenate([np.arange(COUNT)[:, np.newaxis], FEATURES], axis=1)
    return Examples.from_arrays("numbered", numbered, LABELS, ("one", "two", "three"))


def network(features, training):
    v1.add_to_collection("numbers", features[:, 0])
    weights = layers.weights([4, CLASSES], features.dtype, v1.zeros_initializer(), 0.0)
    return tf.cast(features[:, 1:], features.dtype) @ weights


def augment(features, draws):
    """Leaves them, but for the first number, to which a thousand is added for each pass before."""
    passes = tf.cast(1000 * draws.epochs, features.dtype)[:, tf.newaxis]
    return features + passes * tf.constant([[1.0, 0, 0, 0, 0]], features.dtype)


WORKLOAD = Workload("numbered", load, network, augment=augment)


@contextlib.contextmanager
def noting():
    """Notes which examples each step trains on: yields a function that returns them, [steps, global batch]."""
    found = collections.defaultdict(list)

    def calls(begun):
        graph, session = begun.graph, begun.session
        fetches = graph.report, graph.graph.get_collection("numbers")

        def step():
            report, numbers = session.run(fetches)
            found[begun.plan.devices.worker].append(numbers)
            return report

        return step, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Training, "_calls", calls)
        yield lambda: np.concatenate([np.reshape(found[i], [len(found[i]), -1]) for i in sorted(found)], 1).astype(int)


OPTIONS = dict(num_gpus=1, device="cpu", dtype="float64", seed=3, global_batch_size=BATCH, ema=0.0)
OPTIONS |= dict(keep_hardest=f"{EPOCH}:{SHARE}", label_smoothing=SMOOTHING)
OPTIONS |= dict(learning_rate=RATE, learning_rate_decay_factor=1.0)
OPTIONS |= dict(check_towers="never", summary_every_steps=0, check_data=False)


def train(folder, steps, workload=WORKLOAD, **options):
    config = Config(**OPTIONS | dict(train_dir=str(folder), max_steps=steps) | options)
    with noting() as numbers:
        tower_train.train(workload, config)
    return numbers(), saved(folder)


def saved(folder):
    return tf.train.load_checkpoint(str(folder)).get_tensor("weights")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run", STEPS)


def losses_and_gradient(weights, rows):
    """Softmax regression: each row's cross-entropy, and the gradient of their mean."""
    logits = FEATURES[rows] @ weights
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    targets = (1 - SMOOTHING) * np.eye(CLASSES)[LABELS[rows]] + SMOOTHING / CLASSES
    return -(targets * np.log(probabilities)).sum(axis=1), FEATURES[rows].T @ (probabilities - targets) / len(rows)


def test_passes_hold_the_examples_whose_last_losses_were_the_greatest(whole):
    numbers, final = whole
    weights, last, stream, chosen = np.zeros([4, CLASSES]), np.zeros(COUNT), [], {}
    for step, row in enumerate(numbers % 1000):
        first = step * BATCH
        coming = (first + BATCH - 1 - BEGIN) // PASS  # the pass that this step comes to
        if coming >= 0 and coming not in chosen:
            chosen[coming] = set(np.argsort(-last, kind="stable")[:PASS])
        losses, gradient = losses_and_gradient(weights, row)
        for number in set(row):
            last[number] = losses[row == number].max()
        weights -= RATE * gradient
        stream += list(row)
    np.testing.assert_allclose(final, weights, rtol=0, atol=1e-12)
    assert sorted(stream[:COUNT]) == list(range(COUNT)) and len(set(stream[COUNT:BEGIN])) == BEGIN - COUNT
    complete = (STEPS * BATCH - BEGIN) // PASS
    assert complete == 5
    held = [set(stream[BEGIN + i * PASS : BEGIN + (i + 1) * PASS]) for i in range(complete)]
    assert held == [chosen[i] for i in range(complete)]
    assert len(set(map(frozenset, held))) == complete, "examples return"
    passes = (numbers // 1000).ravel()
    expected = [0] * COUNT + [1] * (BEGIN - COUNT) + [2 + i // PASS for i in range(STEPS * BATCH - BEGIN)]
    np.testing.assert_array_equal(passes, expected)


def test_towers_train_on_the_examples_of_one(whole, tmp_path):
    options = dict(num_gpus=3, variable_update="mirrored", augment_on="device")
    numbers, weights = train(tmp_path / "run", STEPS, **options)
    np.testing.assert_array_equal(numbers, whole[0])
    np.testing.assert_allclose(weights, whole[1], rtol=0, atol=1e-12)


def test_workers_train_on_the_examples_of_one(whole, tmp_path):
    options = OPTIONS | dict(max_steps=STEPS, save_every_steps=0)
    with noting() as numbers:
        clusters.train_together(tmp_path / "run", 2, WORKLOAD, **options)
    np.testing.assert_array_equal(numbers(), whole[0])
    np.testing.assert_allclose(saved(tmp_path / "run"), whole[1], rtol=0, atol=1e-12)


def test_a_resumed_run_is_a_whole_one(whole, tmp_path):
    """Stopped at the step before a choice, and at the one after; by towers, and in parts of a step."""
    starts = [(10, {}), (14, dict(num_gpus=2)), (STEPS, dict(accumulate_steps=2))]
    starts = [train(tmp_path / "run", stop, **options) for stop, options in starts]
    np.testing.assert_array_equal(np.concatenate([numbers for numbers, _ in starts]), whole[0])
    np.testing.assert_allclose(starts[-1][1], whole[1], rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The directory of a run of 20 steps."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(folder, 20)
    return folder


@pytest.mark.parametrize("options", [dict(keep_hardest="2.5:0.8"), dict(global_batch_size=7)], ids=str)
def test_a_run_that_goes_on_otherwise_chooses_anew(options, begun, tmp_path):
    """All are trained on in the passes that follow, each of them once in a pass."""
    shutil.copytree(begun, tmp_path / "run")
    numbers, _ = train(tmp_path / "run", STEPS, override=True, **options)
    epoch, share = map(float, options.get("keep_hardest", OPTIONS["keep_hardest"]).split(":"))
    size, begin, first = round(share * COUNT), round(epoch * COUNT), 20 * BATCH
    stream = numbers.ravel() % 1000
    starts = [begin + k * size for k in range(9) if begin + k * size >= first]
    passes = [stream[start - first : start - first + size] for start in starts if start + size <= first + len(stream)]
    assert passes and all(len(set(each)) == size for each in passes)
    assert len({frozenset(each) for each in passes}) == len(passes)


def test_a_run_that_was_begun_on_all_has_unknown_losses_first(tmp_path):
    """They count as the hardest, so that none is left out for good."""
    train(tmp_path / "run", 20, keep_hardest=None)
    numbers, _ = train(tmp_path / "run", STEPS, override=True)
    assert set(numbers.ravel() % 1000) == set(range(COUNT))


OWN_LOSS = dataclasses.replace(WORKLOAD, loss=lambda outputs, labels: tf.reduce_mean(tf.square(outputs)))
MIXED = dataclasses.replace(WORKLOAD, mix=lambda features, labels, draws: (features, labels))


@pytest.mark.parametrize(("workload", "words"), [(OWN_LOSS, "has a loss of its own"), (MIXED, "mixes examples")])
def test_losses_that_are_not_known_are_said(workload, words, tmp_path):
    with pytest.raises(errors.ConfigError, match=f"--keep_hardest=.*{words}"):
        train(tmp_path / "run", 2, workload, batch_size=4, global_batch_size=None, label_smoothing=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(keep_hardest="0.5:0.7"), "an epoch from 1"),
        (dict(keep_hardest="2"), "EPOCH:SHARE"),
        (dict(keep_hardest="2:1.1"), "a share above 0 and at most 1"),
        (dict(keep_hardest="2:0.1"), "keeps 5 of 50 examples, fewer than the 6 of a step"),
    ],
)
def test_what_cannot_be_kept_is_said(options, words, tmp_path):
    with pytest.raises(errors.ConfigError, match=words):
        train(tmp_path / "run", 2, **options)
