"""Options that need or exclude each other."""

import dataclasses

import pytest

from tower_train import errors
from tower_train.config import Config
from tower_train.options import DATA, Options, option, without_useless


@dataclasses.dataclass(frozen=True)
class Tea(Options):
    kind: str = option("green", "which", DATA, allowed=("green", "black", "mint"), resume="same")
    milk: float = option(0.0, "milk in it", DATA, allowed="at least 0", needs=("kind", "black"))
    minutes: int = option(3, "how long", DATA, allowed="at least 1", needs=("kind", "green", "black"))
    sugar: bool = option(False, "with sugar", DATA)
    lumps: int = option(1, "lumps of it", DATA, allowed="at least 1", needs=("sugar",))
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
        (Config, dict(early_stopping_patience_epochs=2.0), "--early_stopping_patience_epochs=2 needs --eval_every"),
        (Config, dict(lr_schedule="piecewise"), "--lr_schedule=piecewise needs --lr_boundaries. Give that too."),
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
