"""Options that need or replace each other, and old names of options and arguments."""

import dataclasses

import pytest

from tower_train import errors, layers
from tower_train.config import Config
from tower_train.options import DATA, Options, command_line, option, renamed, without_useless
from tower_train.run_dir import manifest
from tower_train.workload import Workload


@dataclasses.dataclass(frozen=True)
class Tea(Options):
    kind: str = option("green", "which", DATA, allowed=("green", "black", "mint"), was="leaf", resume="same")
    milk: float = option(0.0, "milk in it", DATA, allowed="at least 0", needs=("kind", "black"))
    minutes: int = option(3, "how long", DATA, allowed="at least 1", needs=("kind", "green", "black"))
    sugar: bool = option(False, "with sugar", DATA, was="sweet")
    lumps: int = option(1, "lumps of it", DATA, allowed="at least 1", needs=("sugar",), was="spoons")
    cups: int | None = option(None, "how much", DATA, needs=("litres", None))
    litres: float | None = option(None, "how much", DATA, needs=("cups", None))


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        (Tea, dict(milk=0.5), "--milk=0.5 needs --kind=black. Give that too."),
        (Tea, dict(minutes=5, kind="mint"), "--minutes=5 needs --kind=green or black. Give that too."),
        (Tea, dict(lumps=2), "--lumps=2 needs --sugar. Give that too."),
        (Tea, dict(cups=4, litres=1), "--cups=4 and --litres=1 exclude each other. Give one of them."),
        (Config, dict(momentum=0.8), "--momentum=0.8 needs --optimizer=momentum or muon. Give that too."),
        (Config, dict(nesterov=True), "--nesterov needs --optimizer=momentum or muon. Give that too."),
        (Config, dict(lr_points="0:1"), "--lr_points=0:1 needs --lr_schedule=points. Give that too."),
        (Config, dict(early_stopping_patience_epochs=2.0), "--early_stopping_patience_epochs=2 needs --eval_every"),
        (Config, dict(lr_schedule="piecewise"), "--lr_schedule=piecewise needs --lr_boundaries. Give that too."),
        (Config, dict(lr_schedule="points"), "--lr_schedule=points needs --lr_points. Give that too."),
        (Config, dict(sync_batch_norm=True, accumulate_steps=2), "--sync_batch_norm and --accumulate_steps=2 exclude"),
        (Config, dict(max_steps=5, epochs=2.5), "--max_steps=5 and --epochs=2.5 exclude each other. Give one of them."),
        (Config, dict(batch_size=4, global_batch_size=8), "--batch_size=4 and --global_batch_size=8 exclude each"),
    ],
)
def test_an_option_without_what_it_needs_is_refused(options, given, text):
    with pytest.raises(errors.ConfigError) as error:
        options(**given)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (dict(kind="mint"), {"milk", "minutes"}),
        (dict(sugar=False), {"lumps"}),
        (dict(litres=2.0), {"cups"}),
        (dict(kind="black", sugar=True, litres=None), set()),
    ],
)
def test_what_a_recipe_has_of_no_use_beside_what_is_given_goes(given, gone):
    recipe = dict(kind="black", milk=0.5, minutes=5, sugar=True, lumps=2, cups=4)
    kept = without_useless(Tea, recipe, given)
    assert kept == {name: value for name, value in recipe.items() if name not in gone}
    assert without_useless(Tea, dict(litres=1.0), dict(cups=4)) == {}


@pytest.fixture(autouse=True)
def nothing_said_yet():
    renamed.say_once.cache_clear()


def test_an_old_name_is_the_option_and_says_so_once(capsys):
    for _ in range(2):
        assert command_line.parse(["tea", "--leaf=black", "--sweet", "--lumps=2"], Tea, "usage") == Tea(
            "black", sugar=True, lumps=2
        )
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "tower_train: --leaf is now called --kind; please use that name.",
        "tower_train: --sweet is now called --sugar; please use that name.",
    ]
    assert command_line.parse(["tea", "--kind=mint", "--nosweet"], Tea, "usage") == Tea("mint")
    assert Tea(leaf="black", sweet=True, spoons=3) == Tea("black", sugar=True, lumps=3)
    assert dataclasses.replace(Tea("black"), leaf="mint") == Tea("mint")
    assert capsys.readouterr().err.count("\n") == 3
    with pytest.raises(TypeError, match="nothing"):
        Tea(nothing=1)


def test_a_run_with_an_old_name_is_compared_by_it():
    def start(**options):
        return {"workload": "tea", "global_batch": 1, "data": {}, "config": {}, "workload_options": options}

    before, now = start(leaf="black", sweet=True), start(**dataclasses.asdict(Tea("mint")))
    with pytest.raises(errors.RunError, match="holds another run: --kind was black, now mint[.]"):
        manifest.check_resume("run", before, now, False, Tea("mint"))


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
    assert dataclasses.replace(old, views=max).test_time_augmentation is max
    said = capsys.readouterr().err
    assert "tower_train: views is now called test_time_augmentation; please use that name.\n" in said
    assert said.count(" is now called ") == 7
