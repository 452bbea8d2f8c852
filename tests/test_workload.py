"""A workload is found by its import path, but not in the directory of a run, which is data. Its own options are on the
command line, in run.json, on resuming and in evaluation."""

import dataclasses
import json
import re
import shutil
import sys

import element_workloads
import jobs
import numpy as np
import pytest
import toy_workload

import tower_train
from tower_train import EvaluateOptions, Workload, __main__, errors, evaluate_run, workload
from tower_train.config import Config, ExportOptions
from tower_train.inference import saved_model, serving
from tower_train.options import DATA, Options, option


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from tower_train import Workload\nWORKLOAD = Workload('a', None, None)\nOTHER = Workload('b', None, None)\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "broken_one.py").write_text("raise ValueError('of its own')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


def test_a_module_of_the_current_directory_is_found_and_its_own_mistakes_are_not_hidden(modules):
    assert [workload.load(path).name for path in ("mine", "mine:OTHER", "cifar10")] == ["a", "b", "cifar10"]
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        workload.load("needs_more")
    with pytest.raises(ValueError, match="of its own"):
        workload.load("broken_one")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        *((path, "there is no module ") for path in ("no_such", "cifar10.no_such", "", ".cifar10", ":X", "a-b")),
        *((path, "Did you mean a.b?") for path in ("a/b.py", "./a/b", "a/b.py:X")),
        ("../a/b.py", "there is no module '../a/b.py' to import. Give"),
        ("mine:NONE", "mine has no tower_train.Workload named NONE. Define one"),
        ("json", "json has no tower_train.Workload named WORKLOAD. Define one"),
    ],
)
def test_a_path_that_leads_to_no_workload_is_refused(modules, path, words):
    with pytest.raises(errors.ConfigError) as error:
        workload.load(path)
    assert str(error.value).startswith(f"--workload={path}: ") and words in str(error.value)


EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('executed')\nfrom toy_workload import WORKLOAD\n"


@pytest.fixture
def evil(toy_run, tmp_path, monkeypatch):
    """A copy of a run whose run.json names the workload `evil`."""
    shutil.copytree(toy_run, tmp_path / "run")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name(tmp_path / "run", "evil")
    return tmp_path / "run"


def name(run, path, **changed):
    run_json = jobs.read_json(run, "run.json") | changed
    run_json["config"]["workload"] = path
    (run / "run.json").write_text(json.dumps(run_json))


def put(path, marker):
    """Writes a module that leaves a marker when it is executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(EVIL.format(marker=str(marker)))


WAYS = {  # {name: (the workload, modules, links, the current directory, the train_dir)}, below the folder of the run
    "a module": ("evil", ["run/evil.py"], {}, "run", "."),
    "a package": ("evil.deeper", ["run/evil/__init__.py", "run/evil/deeper.py"], {}, "run", "../run"),
    "a folder without __init__.py": ("run.deeper.evil", ["run/deeper/evil.py"], {}, ".", "run"),
    "a link": ("evil", ["elsewhere/evil.py"], {"run/evil.py": "elsewhere/evil.py"}, "run", "../run"),
    "a module that a link leads to": ("evil", ["run/evil.py"], {"evil.py": "run/evil.py"}, ".", "run"),
}


@pytest.mark.parametrize(("path", "modules", "links", "current", "train_dir"), WAYS.values(), ids=WAYS)
def test_nothing_in_a_run_is_executed(path, modules, links, current, train_dir, evil, tmp_path, monkeypatch):
    name(evil, path)
    for module in modules:
        put(tmp_path / module, tmp_path / "marker")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    monkeypatch.chdir(tmp_path / current)
    uses = [
        lambda: list(evaluate_run(EvaluateOptions(train_dir=train_dir))),
        lambda: list(evaluate_run(EvaluateOptions(train_dir=train_dir, workload=path))),
        lambda: serving.open_run(ExportOptions(train_dir=train_dir)),
        lambda: saved_model.export_run(ExportOptions(train_dir=train_dir)),
        lambda: __main__.main(["tower_train", f"--train_dir={train_dir}", f"--workload={path}"]),
    ]
    for use in uses:
        with pytest.raises(errors.RunError, match=f"--workload={path} is .*which lies in the run"):
            use()
    (evil / "run.json").unlink()
    with pytest.raises(errors.RunError, match="which lies in the run"):
        uses[-1]()
    assert not (tmp_path / "marker").exists()


def test_training_does_not_import_what_a_run_names(evil, cifar10_dir, tmp_path, monkeypatch, refusal):
    put(tmp_path / "evil.py", tmp_path / "marker")
    monkeypatch.chdir(tmp_path)
    assert jobs.train_toy("run", max_steps=41).step == 41
    name(evil, "evil")
    line = refusal(__main__, "--train_dir=run", f"--data_dir={cifar10_dir}")
    assert "another run: workload was toy, now cifar10" in line
    assert not (tmp_path / "marker").exists()


def test_a_run_names_no_other_code_than_what_was_trained(evil, tmp_path, monkeypatch):
    """Whoever trusts it names it; code that has moved with its run, too."""
    put(tmp_path / "evil.py", tmp_path / "marker")
    put(tmp_path / "below" / "evil.py", tmp_path / "marker")
    monkeypatch.chdir(tmp_path)
    options = EvaluateOptions(train_dir="run")
    for path in ("evil", "below.evil", "antigravity"):
        name(evil, path)
        with pytest.raises(errors.RunError, match=f"names the workload {path}, which is .* If you trust that file, gi"):
            list(evaluate_run(options))
    assert not (tmp_path / "marker").exists() and "antigravity" not in sys.modules
    (tmp_path / "task.py").write_text("from toy_workload import WORKLOAD as TASK\n")
    name(evil, "task:TASK")
    assert list(evaluate_run(dataclasses.replace(options, workload="task:TASK")))
    name(evil, "task:TASK", workload_file=str(tmp_path / "task.py"))
    assert list(evaluate_run(options))


@dataclasses.dataclass(frozen=True)
class ToyOptions(Options):
    shift: float = option(0.0, "added to every feature", DATA, allowed="at least 0", resume="same")
    loud: bool = option(False, "changes nothing", DATA)


@dataclasses.dataclass(frozen=True)
class GreedyOptions(Options):
    seed: int = option(0, "another one is the trainer's", DATA)


def configured(options):
    def network(features, training):
        return toy_workload.network(features + options.shift, training)

    recipe = {"learning_rate": 0.02, "epochs": 3.0, "batch_size": 4}
    recipe |= {"learning_rate": 0.5, "batch_size": 2} if options.shift == 9 else {}
    recipes = {"far": {"shift": 9.0}, "near": {"shift": 0.5}}
    return Workload(
        "optional", toy_workload.load, network, options=options, configure=configured, recipe=recipe, recipes=recipes
    )


OPTIONAL = configured(ToyOptions())
GREEDY = Workload("greedy", None, None, options=GreedyOptions(), configure=lambda options: GREEDY)


def parse(*words):
    return __main__.parse(["program", f"--workload={__name__}:OPTIONAL", *words])


def test_a_workloads_options_stand_beside_the_trainers_in_any_order():
    config, options = parse("--shift", "1.5", "--seed=3", "--noloud", "--num_gpus", "2")
    assert options == {"shift": 1.5, "loud": False}
    assert (config.seed, config.num_gpus) == (3, 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--momentum=0.8"], "--momentum=0.8 needs --optimizer=momentum or muon."),
        (["--shift=-1"], "--shift=-1: it must be a number at least 0."),
        (["--shft=1"], "There is no option --shft. Did you mean --shift?"),
        (["--recipe=fra"], "--recipe=fra: workload optional has the recipes far, near."),
        (["--recipe=far", "--shift=1"], "--recipe=far and --shift=1.0 exclude each other: the recipe has --shift=9.0."),
        (["--workload=toy_workload", "--recipe=far"], "--recipe=far: workload toy has no recipes."),
        ([f"--workload={__name__}:GREEDY"], f"--workload={__name__}:GREEDY has an option --seed, as the trainer has"),
    ],
)
def test_mistakes_are_told_as_those_in_the_trainers_options(words, text):
    with pytest.raises(errors.ConfigError) as raised:
        parse(*words)
    assert str(raised.value).startswith(text)


def test_a_recipe_is_the_options_it_names_with_all_that_suits_them():
    assert parse("--recipe=far", "--num_gpus=2") == parse("--shift=9", "--num_gpus=2")
    config, options = parse("--recipe=far")
    assert options == {"shift": 9.0}
    assert (config.learning_rate, config.batch_size, config.epochs) == (0.5, 2, 3.0)
    config, options = parse("--batch_size=6", "--recipe=far", "--loud", "--max_steps=7", "--shift=9")
    assert (config.learning_rate, config.batch_size, config.max_steps, config.epochs) == (0.5, 6, 7, None)
    assert options == {"shift": 9.0, "loud": True}


@pytest.mark.parametrize(("word", "rate"), [("--seed=0", "0.02"), ("--recipe=far", "0.5")])
def test_help_shows_the_values_of_the_recipe(capsys, word, rate):
    with pytest.raises(SystemExit):
        parse("--help", word)
    shown = capsys.readouterr().out
    text = re.search(r"  --learning_rate .*?(?=\n  --)", shown, re.DOTALL)[0]
    assert text.endswith(f"[{rate}]")
    text = re.search(r"  --batch_size .*?(?=\n  --)", shown, re.DOTALL)[0]
    assert text.endswith("[2]" if rate == "0.5" else "[4]") and "(128)" not in text


def test_a_run_keeps_its_options_and_evaluation_uses_them(tmp_path):
    def train(steps, **options):
        config = Config(**jobs.SMALL | dict(train_dir=str(tmp_path), max_steps=steps))
        return tower_train.train(f"{__name__}:OPTIONAL", config, workload_options=options)

    train(5, shift=2.0)
    assert jobs.read_json(tmp_path, "run.json")["workload_options"] == {"shift": 2.0, "loud": False}
    with pytest.raises(errors.RunError, match="--shift was 2.0, now 0.0"):
        train(6)
    assert train(6, shift=2.0, loud=True).step == 6
    [found] = tower_train.evaluate_run(tower_train.EvaluateOptions(train_dir=str(tmp_path)))
    features, labels = element_workloads.arrays("test")
    right, other = (
        np.mean(np.argmax(jobs.toy_logits(jobs.variables(tmp_path), features + shift, ""), axis=1) == labels)
        for shift in (2.0, 0.0)
    )
    assert found.metrics["precision @ 1"].mean == pytest.approx(right) and right != other
