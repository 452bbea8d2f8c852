"""A workload's own options: on the command line, in run.json, on resuming and in evaluation."""

import re

import element_workloads
import jobs
import numpy as np
import pytest

import tower_train
from tower_train import __main__, errors
from tower_train.config import Config

MODULE = '''
"""The toy workload with options of its own."""

import dataclasses

import toy_workload
from tower_train import Examples, Workload
from tower_train.options import DATA, Options, option


@dataclasses.dataclass(frozen=True)
class ToyOptions(Options):
    shift: float = option(0.0, "added to every feature", DATA, allowed="at least 0", resume="same")
    loud: bool = option(False, "changes nothing", DATA)


def make(options):
    def network(features, training):
        return toy_workload.network(features + options.shift, training)

    recipes = {"far": {"shift": 9.0}, "near": {"shift": 0.5}}
    recipe = {recipe} | ({"learning_rate": 0.5, "batch_size": 2} if options.shift == 9 else {})
    return Workload(
        "optional", toy_workload.load, network, options=options, configure=make, recipe=recipe, recipes=recipes
    )


WORKLOAD = make(ToyOptions())
'''


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A folder with workloads that have options: `optional_toy`, and `greedy_toy`, one of which is the trainer's."""
    folder = tmp_path_factory.mktemp("modules")
    recipe = "{'learning_rate': 0.02, 'epochs': 3.0, 'batch_size': 4}"
    (folder / "optional_toy.py").write_text(MODULE.replace("{recipe}", recipe))
    (folder / "greedy_toy.py").write_text(MODULE.replace("{recipe}", "{}").replace("shift", "seed"))
    return folder


@pytest.fixture
def parse(modules, monkeypatch):
    monkeypatch.syspath_prepend(str(modules))
    return lambda *words: __main__.parse(["program", "--workload=optional_toy", *words])


def test_a_workloads_options_stand_beside_the_trainers_in_any_order(parse):
    config, options = parse("--shift", "1.5", "--seed=3", "--noloud", "--num_gpus", "2")
    assert options == {"shift": 1.5, "loud": False}
    assert (config.seed, config.num_gpus, config.workload) == (3, 2, "optional_toy")


@pytest.mark.parametrize(("words", "text"), [
    (["--momentum=0.8"], "--momentum=0.8 needs --optimizer=momentum or muon."),
    (["--shift=-1"], "--shift=-1: it must be a number at least 0."),
    (["--shft=1"], "There is no option --shft. Did you mean --shift?"),
    (["--recipe=fra"], "--recipe=fra: workload optional has the recipes far, near."),
    (["--recipe=far", "--shift=1"], "--recipe=far and --shift=1.0 exclude each other: the recipe has --shift=9.0."),
    (["--workload=toy_workload", "--recipe=far"], "--recipe=far: workload toy has no recipes."),
    (["--workload=greedy_toy"], "--workload=greedy_toy has an option --seed, as the trainer has"),
])  # fmt: skip
def test_mistakes_are_told_as_those_in_the_trainers_options(parse, words, text):
    with pytest.raises(errors.ConfigError) as raised:
        parse(*words)
    assert str(raised.value).startswith(text)


def test_a_recipe_is_the_options_it_names_with_all_that_suits_them(parse):
    assert parse("--recipe=far", "--num_gpus=2") == parse("--shift=9", "--num_gpus=2")
    config, options = parse("--recipe=far")
    assert options == {"shift": 9.0}
    assert (config.learning_rate, config.batch_size, config.epochs) == (0.5, 2, 3.0)


def test_what_the_command_line_gives_wins(parse):
    config, options = parse("--batch_size=6", "--recipe=far", "--loud", "--max_steps=7", "--shift=9")
    assert (config.learning_rate, config.batch_size, config.max_steps, config.epochs) == (0.5, 6, 7, None)
    assert options == {"shift": 9.0, "loud": True}


@pytest.mark.parametrize(("words", "rate"), [([], "0.02"), (["--shift=9"], "0.5"), (["--recipe=far"], "0.5")])
def test_help_shows_the_values_of_the_recipe(parse, capsys, words, rate):
    with pytest.raises(SystemExit):
        parse("--help", *words)
    shown = capsys.readouterr().out
    text = re.search(r"  --learning_rate .*?(?=\n  --)", shown, re.DOTALL)[0]
    assert text.endswith(f"[{rate}]")
    text = re.search(r"  --batch_size .*?(?=\n  --)", shown, re.DOTALL)[0]
    assert text.endswith("[2]" if rate == "0.5" else "[4]") and "(128)" not in text


def test_a_run_keeps_its_options_and_evaluation_uses_them(modules, tmp_path, monkeypatch):
    """Another value is refused on resuming, or free, as they say."""
    monkeypatch.syspath_prepend(str(modules))

    def train(steps, **options):
        config = Config(train_dir=str(tmp_path), num_gpus=2, max_steps=steps, batch_size=4, learning_rate=0.02)
        return tower_train.train("optional_toy", config, workload_options=options)

    train(5, shift=2.0)
    assert jobs.read_json(tmp_path, "run.json")["workload_options"] == {"shift": 2.0, "loud": False}
    with pytest.raises(errors.RunError, match="--shift was 2.0, now 0.0"):
        train(6)
    assert train(6, shift=2.0, loud=True).step == 6
    [found] = tower_train.evaluate_run(tower_train.EvaluateOptions(train_dir=str(tmp_path)))
    features, labels = element_workloads.arrays("test")
    right, other = (np.mean(np.argmax(jobs.toy_logits(jobs.variables(tmp_path), features + shift), axis=1) == labels)
                    for shift in (2.0, 0.0))  # fmt: skip
    assert found.metrics["precision @ 1"].mean == pytest.approx(right) and right != other
