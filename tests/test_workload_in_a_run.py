"""A run is data: a workload that lies in its directory is not imported, however it is named."""

import json
import shutil
import sys

import jobs
import pytest

from tower_train import EvaluateOptions, __main__, errors, evaluate_run
from tower_train.config import ExportOptions
from tower_train.inference import saved_model, serving

EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('executed')\nfrom toy_workload import WORKLOAD\n"


@pytest.fixture
def run(toy_run, tmp_path, monkeypatch):
    """A copy of a run whose run.json names the workload `evil`. After the test Python knows nothing of it any more."""
    shutil.copytree(toy_run, tmp_path / "run")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name(tmp_path / "run", "evil")
    yield tmp_path / "run"
    for module in [module for module in sys.modules if module.partition(".")[0] == "evil"]:
        del sys.modules[module]


def name(run, workload):
    run_json = jobs.read_json(run, "run.json")
    run_json["config"]["workload"] = workload
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


@pytest.mark.parametrize(("workload", "modules", "links", "current", "train_dir"), WAYS.values(), ids=WAYS)
def test_nothing_in_a_run_is_executed(workload, modules, links, current, train_dir, run, tmp_path, monkeypatch):
    """In evaluation, prediction and export."""
    name(run, workload)
    for module in modules:
        put(tmp_path / module, tmp_path / "marker")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    monkeypatch.chdir(tmp_path / current)
    uses = [
        lambda: list(evaluate_run(EvaluateOptions(train_dir=train_dir))),
        lambda: list(evaluate_run(EvaluateOptions(train_dir=train_dir, workload=workload))),
        lambda: serving.open_run(ExportOptions(train_dir=train_dir)),
        lambda: saved_model.export(ExportOptions(train_dir=train_dir), tmp_path / "export"),
    ]
    for use in uses:
        with pytest.raises(errors.RunError, match=f"--workload={workload} is .*which lies in the run"):
            use()
    assert not (tmp_path / "marker").exists()


def test_training_does_not_import_what_a_run_names(run, cifar10_dir, tmp_path, monkeypatch, command):
    put(tmp_path / "evil.py", tmp_path / "marker")
    monkeypatch.chdir(tmp_path)
    assert jobs.train_toy("run", max_steps=41).step == 41
    name(run, "evil")
    status, _, stderr = command(__main__, "--train_dir=run", f"--data_dir={cifar10_dir}")
    assert status == 2 and "another run: workload was toy, now cifar10" in stderr
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("run_has_begun", [False, True])
def test_training_imports_nothing_from_its_train_dir(run_has_begun, run, tmp_path, monkeypatch, command):
    put(run / "evil.py", tmp_path / "marker")
    if not run_has_begun:
        (run / "run.json").unlink()
    monkeypatch.chdir(run)
    status, stdout, stderr = command(__main__, "--train_dir=.", "--workload=evil")
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"tower_train: error: --workload=evil is {run}/evil.py, which lies in the run .. ")
    assert stderr.count("\n") == 1 and not (tmp_path / "marker").exists()
