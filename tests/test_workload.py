"""A workload is found by its import path."""

import pytest

import cifar10
from tower_train import workload
from tower_train.errors import ConfigError


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A directory of modules to import, as the current directory."""
    (tmp_path / "mine.py").write_text(
        "from tower_train import Workload\nWORKLOAD = Workload('a', None, None)\nOTHER = Workload('b', None, None)\n"
    )
    (tmp_path / "empty_one.py").write_text("WORKLOAD = 'no workload'\n")
    (tmp_path / "needs_more.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "broken_one.py").write_text("raise ValueError('of its own')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


def test_a_module_names_its_workload():
    assert workload.load("cifar10") is cifar10.WORKLOAD


def test_a_module_of_the_current_directory_is_found(modules):
    assert workload.load("mine").name == "a"
    assert workload.load("mine:OTHER").name == "b"


@pytest.mark.parametrize(
    "path", ["no_such", "cifar10.no_such", "no_such.deeper", "", ".", ".cifar10", ":X", "a-b", "a/b.py"]
)
def test_a_module_that_is_not_there_is_named(path):
    with pytest.raises(ConfigError) as error:
        workload.load(path)
    assert str(error.value).startswith(f"--workload={path}: there is no module ")
    assert ("Did you mean a.b?" in str(error.value)) == path.endswith(".py")


def test_the_short_name_of_one_that_comes_with_it_is_understood(modules):
    with pytest.raises(ConfigError, match="Did you mean tower_train.workloads.fashion_mnist"):
        workload.load("fashion_mnist")


@pytest.mark.parametrize(
    ("module", "attribute", "missing"),
    [("mine", ":NONE", "NONE"), ("empty_one", "", "WORKLOAD"), ("json", "", "WORKLOAD")],
)
def test_a_module_without_that_workload_is_named(modules, module, attribute, missing):
    with pytest.raises(ConfigError, match=f"{module} has no tower_train.Workload named {missing}. Define one"):
        workload.load(module + attribute)


def test_what_a_module_itself_lacks_is_not_hidden(modules):
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        workload.load("needs_more")
    with pytest.raises(ValueError, match="of its own"):
        workload.load("broken_one")
