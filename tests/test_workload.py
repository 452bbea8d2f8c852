"""A workload is found by its import path, but not in the directory of a run, which is data."""

import json
import shutil
import sys

import jobs
import pytest

from tower_train import EvaluateOptions, __main__, errors, evaluate_run, workload
from tower_train.config import ExportOptions
from tower_train.inference import saved_model, serving


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A directory of modules to import, as the current directory."""
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


MISSING = "there is no module "


@pytest.mark.parametrize(("path", "words"), [
    *((path, MISSING) for path in ("no_such", "cifar10.no_such", "no_such.deeper", "", ".", ".cifar10", ":X", "a-b")),
    ("a/b.py", "Did you mean a.b?"), ("fashion_mnist", "Did you mean tower_train.workloads.fashion_mnist?"),
    ("mine:NONE", "mine has no tower_train.Workload named NONE. Define one"),
    ("json", "json has no tower_train.Workload named WORKLOAD. Define one"),
])  # fmt: skip
def test_a_path_that_leads_to_no_workload_is_refused(modules, path, words):
    with pytest.raises(errors.ConfigError) as error:
        workload.load(path)
    assert str(error.value).startswith(f"--workload={path}: ") and words in str(error.value)


EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('executed')\nfrom toy_workload import WORKLOAD\n"


@pytest.fixture
def evil(toy_run, tmp_path, monkeypatch):
    """A copy of a run whose run.json names the workload `evil`. After the test Python knows nothing of it any more."""
    shutil.copytree(toy_run, tmp_path / "run")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name(tmp_path / "run", "evil")
    yield tmp_path / "run"
    for module in [module for module in sys.modules if module.partition(".")[0] == "evil"]:
        del sys.modules[module]


def name(run, path):
    run_json = jobs.read_json(run, "run.json")
    run_json["config"]["workload"] = path
    (run / "run.json").write_text(json.dumps(run_json))


def put(path, marker):
    """Writes a module that leaves a marker when it is executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(EVIL.format(marker=str(marker)))


WAYS = {  # {name: (the workload, modules, links, the current directory, the train_dir)}, below the folder of the run
    "a module": ("evil", ["run/evil.py"], {}, "run", "."),
    "a package": ("evil.deeper", ["run/evil/__init__.py", "run/evil/deeper.py"], {}, "run", "../run"),
    "a link": ("evil", ["elsewhere/evil.py"], {"run/evil.py": "elsewhere/evil.py"}, "run", "../run"),
    "a module that a link leads to": ("evil", ["run/evil.py"], {"evil.py": "run/evil.py"}, ".", "run"),
}


@pytest.mark.parametrize(("path", "modules", "links", "current", "train_dir"), WAYS.values(), ids=WAYS)
def test_nothing_in_a_run_is_executed(path, modules, links, current, train_dir, evil, tmp_path, monkeypatch):
    """In evaluation, prediction and export."""
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
        lambda: saved_model.export(ExportOptions(train_dir=train_dir), tmp_path / "export"),
    ]
    for use in uses:
        with pytest.raises(errors.RunError, match=f"--workload={path} is .*which lies in the run"):
            use()
    assert not (tmp_path / "marker").exists()


def test_training_does_not_import_what_a_run_names(evil, cifar10_dir, tmp_path, monkeypatch, refusal):
    put(tmp_path / "evil.py", tmp_path / "marker")
    monkeypatch.chdir(tmp_path)
    assert jobs.train_toy("run", max_steps=41).step == 41
    name(evil, "evil")
    line = refusal(__main__, "--train_dir=run", f"--data_dir={cifar10_dir}")
    assert "another run: workload was toy, now cifar10" in line
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("run_has_begun", [False, True])
def test_training_imports_nothing_from_its_train_dir(run_has_begun, evil, tmp_path, monkeypatch, refusal):
    put(evil / "evil.py", tmp_path / "marker")
    if not run_has_begun:
        (evil / "run.json").unlink()
    monkeypatch.chdir(evil)
    line = refusal(__main__, "--train_dir=.", "--workload=evil")
    assert f"--workload=evil is {evil}/evil.py, which lies in the run .. " in line
    assert not (tmp_path / "marker").exists()
