"""Options and arguments that have another name now are taken by the old one too, and say once what they are called."""

import dataclasses

import pytest

from tower_train import errors, layers
from tower_train.config import Config
from tower_train.options import DATA, Options, command_line, option, renamed
from tower_train.run_dir import manifest
from tower_train.workload import Workload


@dataclasses.dataclass(frozen=True)
class Tea(Options):
    leaf: str = option("green", "which", DATA, was="kind", resume="same")
    sweet: bool = option(False, "with sugar", DATA, was="sugar")
    spoons: int = option(1, "of it", DATA, needs=("sweet",), was="lumps")


@pytest.fixture(autouse=True)
def nothing_said_yet():
    renamed.say_once.cache_clear()


def parse(*words):
    return command_line.parse(["tea", *words], Tea, "usage")


def test_an_old_name_on_a_command_line_is_the_option_and_says_so_once(capsys):
    for _ in range(2):
        assert parse("--kind=black", "--sugar", "--spoons=2") == Tea("black", True, 2)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "tower_train: --kind is now called --leaf; please use that name.",
        "tower_train: --sugar is now called --sweet; please use that name.",
    ]
    assert parse("--leaf=mint", "--nosugar") == Tea("mint", False)


def test_an_old_name_in_python_is_the_option(capsys):
    assert Tea(kind="black", sugar=True, lumps=3) == Tea("black", True, 3)
    assert dataclasses.replace(Tea("black"), kind="mint") == Tea("mint")
    assert capsys.readouterr().err.count("\n") == 3
    with pytest.raises(TypeError, match="nothing"):
        Tea(nothing=1)


def test_a_run_with_an_old_name_is_compared_by_it():
    def start(**options):
        return {"workload": "tea", "global_batch": 1, "data": {}, "config": {}, "workload_options": options}

    before, now = start(kind="black", sugar=True), start(**dataclasses.asdict(Tea("mint")))
    with pytest.raises(errors.RunError, match="holds another run: --leaf was black, now mint[.]"):
        manifest.check_resume("run", before, now, False, Tea("mint"))


@dataclasses.dataclass(frozen=True)
class Paint(metaclass=renamed.TakesOldNames):
    thing: str
    color: str = dataclasses.field(default="red", metadata={"was": "colour"})


def test_an_old_keyword_of_a_record_is_the_argument(capsys):
    assert Paint("door", colour="blue") == Paint("door", "blue") == dataclasses.replace(Paint("door"), colour="blue")
    assert capsys.readouterr().err == "tower_train: colour is now called color; please use that name.\n"


def test_the_present_names_of_the_public_ones_that_had_another(capsys):
    def best(features, training):
        with layers.learning(rate_factor=2.0):
            return features

    old = Workload("old", None, best, distort=max, views=min, better={"off by": "lower"})
    assert old == Workload("old", None, best, augment=max, test_time_augmentation=min, mode={"off by": "min"})
    assert (old.distort, old.views, old.better) == (max, min, {"off by": "min"})
    assert best(1, True) == 1
    config = Config(distort_on="host", stop_after_no_gain_epochs=2.0, eval_every_steps=1, moving_average_decay=0.5)
    assert (config.augment_on, config.early_stopping_patience_epochs, config.ema) == ("host", 2.0, 0.5)
    assert capsys.readouterr().err.count(" is now called ") == 7
