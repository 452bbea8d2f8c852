"""--algorithms: the fastest in trials, which a run stays with; the trials' times are given here."""

import json
import types

import clusters
import pytest
import tensorflow as tf
import two_ways
from jobs import train_toy

from tower_train import config, errors
from tower_train.cluster.single_process import SingleProcess
from tower_train.cluster.task import Task
from tower_train.graph import kernels
from tower_train.graph.context import Trial
from tower_train.run import algorithms

SITE, STEPS = "thrice:4", dict(workload="two_ways", max_steps=2, save_every_steps=0, num_gpus=1)


@pytest.fixture
def trials(monkeypatch):
    """Sets the seconds that trials find; the list of trials. Any run is long enough for them."""
    done = []

    def give(**seconds):
        def measure(found, trial, session_config):
            done.append((tuple(found), trial))
            return seconds

        monkeypatch.setattr(algorithms, "time_trials", measure)
        return done

    monkeypatch.setattr(algorithms, "LEAST_STEPS", 2)
    return give


def chosen(train_dir):
    return json.loads((train_dir / "run.json").read_text())["config"]["algorithms"]


def rewrite(train_dir, change):
    path = train_dir / "run.json"
    content = json.loads(path.read_text())
    change(content["config"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (dict(product=1.0, sum=0.9), "sum"), (dict(product=1.0, sum=0.96), "product"),
        (dict(product=0.5, sum=1.0), "product"), (dict(sum=1.0), "sum"), ({}, "product"),
    ],
)  # fmt: skip
def test_another_algorithm_than_the_usual_one_must_be_faster_by_a_twentieth(seconds, expected):
    member = SingleProcess(Task(("here:1",), 0), None)
    session_config = tf.compat.v1.ConfigProto()
    chooser = algorithms.Chooser("auto", "auto", member, session_config, lambda *_: seconds)
    ways, trial = {"product": None, "sum": None}, Trial(((4,),), tf.float32, (True,))
    assert [chooser.choose(SITE, ways, trial) for _ in range(2)] == [expected] * 2
    assert chooser.text == f"{SITE}={expected}" and len(chooser.notes()) == 2


def test_a_run_stays_with_what_its_trials_found_whatever_others_would(trials, tmp_path, capsys):
    done = trials(product=2e-3, sum=1e-3)
    train_toy(tmp_path, **STEPS)
    assert done == [(("product", "sum"), Trial(((8, 4),), tf.float32, (True,)))]
    assert chosen(tmp_path) == f"{SITE}=sum" and two_ways.built[-1] == "sum"
    said = capsys.readouterr().out
    assert f"algorithms: {SITE}=sum; trials: product 2.0 ms, sum 1.0 ms\n" in said
    assert f"algorithms: --algorithms={SITE}=sum repeats this choice\n" in said

    trials(product=1e-3, sum=2e-3)
    train_toy(tmp_path, **STEPS | dict(max_steps=4, num_gpus=2, batch_size=4))
    assert len(done) == 1 and two_ways.built[-2:] == ["sum", "sum"]
    assert "algorithms" not in capsys.readouterr().out
    train_toy(tmp_path, **STEPS | dict(max_steps=5, algorithms="product"))
    assert two_ways.built[-1] == "product" and chosen(tmp_path) == f"{SITE}=product"
    assert f"--algorithms was {SITE}=sum, now {SITE}=product." in capsys.readouterr().out


def test_what_no_trial_is_worth_takes_the_usual_one(trials, tmp_path, monkeypatch):
    """A short run, float64, --deterministic, and a run of a version that knew no trials."""
    done = trials(product=2e-3, sum=1e-3)
    monkeypatch.setattr(kernels, "choose", lambda *_: None)  # which would last as long as this process
    train_toy(tmp_path / "repeats", **STEPS | dict(deterministic=True))
    train_toy(tmp_path / "short", **STEPS | dict(max_steps=1))
    train_toy(tmp_path / "exact", **STEPS | dict(dtype="float64"))
    rewrite(tmp_path / "short", lambda options: options.pop("algorithms"))
    train_toy(tmp_path / "short", **STEPS)
    assert not done and two_ways.built[-4:] == ["product"] * 4
    assert {chosen(tmp_path / name) for name in ("short", "exact", "repeats")} == {f"{SITE}=product"}


def test_workers_take_what_the_chief_has_chosen(trials, tmp_path):
    done = trials(product=2e-3, sum=1e-3)
    options = STEPS | dict(batch_size=4, summary_every_steps=0, check_data=False)
    results = clusters.train_together(tmp_path, 2, **options)
    assert [getattr(result, "step", result) for result in results] == [2, 2]
    assert len(done) == 1 and two_ways.built[-2:] == ["sum", "sum"] and chosen(tmp_path) == f"{SITE}=sum"


@pytest.mark.parametrize("chiefs", [None, "product_float32"])
def test_a_worker_whose_chief_chooses_nothing_or_what_it_lacks_takes_the_usual_one(chiefs):
    member = types.SimpleNamespace(task=Task(("a:1", "b:1"), 1), chiefs_algorithm=lambda site: chiefs,
                                   tell_algorithm=lambda site, name: None)  # fmt: skip
    chooser = algorithms.Chooser("auto", "auto", member, tf.compat.v1.ConfigProto(), None)
    assert chooser.choose(SITE, {"product": None, "sum": None}, Trial(((4,),), tf.float32, (True,))) == "product"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quick", f"there is no quick. This network's sites and algorithms are {SITE}: product, sum."),
        (f"{SITE}=quick", f"there is no quick for {SITE}. This"), ("other=sum", "there is no sum for other. This"),
    ],
)  # fmt: skip
def test_an_algorithm_that_is_not_there_is_refused(given, message, tmp_path):
    with pytest.raises(errors.ConfigError) as refusal:
        train_toy(tmp_path, **STEPS, algorithms=given)
    assert str(refusal.value).startswith(f"--algorithms={given}: {message}")


def test_a_network_without_a_choice_refuses_one(tmp_path):
    with pytest.raises(errors.ConfigError, match="Leave the option out: nothing in this network has several"):
        train_toy(tmp_path, max_steps=1, algorithms="direct")


@pytest.mark.parametrize("text", ["", "a=", "a=b,a=c", "a=b,c", "a b", "a=b=c"])
def test_only_names_and_pairs_are_read(text, tmp_path):
    with pytest.raises(errors.ConfigError, match="each site once"):
        config.Config(algorithms=text)


def test_a_run_json_with_other_text_is_refused(tmp_path, trials):
    train_toy(tmp_path, **STEPS | dict(max_steps=1))
    rewrite(tmp_path, lambda options: options.update(algorithms="a=b,c"))
    with pytest.raises(errors.RunError, match="config.algorithms is .* and must be auto, usual, the name of"):
        train_toy(tmp_path, **STEPS)


def test_trials_compute_each_algorithm_with_its_gradients_and_leave_out_what_fails():
    traced = []

    def traced_square(name, factor):
        def square(x, y):
            def note(value):
                traced.append(name)
                return value

            noted = tf.compat.v1.py_func(note, [x], x.dtype, stateful=True)
            return factor * tf.reshape(noted, x.shape) * x * y

        return square

    def fails(x, y):
        return tf.reshape(tf.boolean_mask(x, x > 1e9), x.shape) * y

    ways = {"a": traced_square("a", 1.0), "fails": fails, "b": traced_square("b", 2.0)}
    trial = Trial(((3, 2), (3, 2)), tf.float32, (False, True))
    seconds = algorithms.time_trials(ways, trial, tf.compat.v1.ConfigProto())
    assert list(seconds) == ["a", "b"] and all(0 < each < 60 for each in seconds.values())
    assert traced[:2] == ["a", "b"] and traced.count("a") + traced.count("b") >= 5
