"""Where a user gives another option than a recipe, what the recipe has for its own goes."""

import pytest

from tower_train import errors, rules
from tower_train.workload import Workload

RECIPE = dict(epochs=9.9, optimizer="momentum", momentum=0.85, nesterov=True, lr_schedule="points",
              lr_points="0:1,1:0", lookahead_every_steps=5, lookahead_decay=0.7, lookahead_ramp=3.0)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (dict(max_steps=5), {"epochs"}),
        (dict(optimizer="adam"), {"nesterov"}),
        (dict(lr_schedule="cosine"), {"lr_points"}),
        (dict(lookahead_every_steps=0), {"lookahead_decay", "lookahead_ramp"}),
        (dict(lookahead_every_steps=3, lr_schedule="points", optimizer="momentum", epochs=2.0), set()),
        (dict(batch_size=8), set()),
    ],
)
def test_what_is_of_no_use_beside_what_is_given_goes(given, gone):
    kept = rules.without_useless(RECIPE, given)
    assert kept == {name: value for name, value in RECIPE.items() if name not in gone}
    config = Workload("recipe", None, None, recipe=RECIPE).config(**given)
    assert all(getattr(config, name) == value for name, value in (kept | given).items())


def test_boundaries_go_with_their_schedule():
    recipe = dict(lr_schedule="piecewise", lr_boundaries=(82, 123))
    assert rules.without_useless(recipe, dict(lr_schedule="linear")) == dict(lr_schedule="piecewise")


def test_what_is_given_stays_and_is_refused():
    with pytest.raises(errors.ConfigError, match="--lookahead_decay=0.9 is for --lookahead_every_steps"):
        Workload("recipe", None, None, recipe=RECIPE).config(lookahead_every_steps=0, lookahead_decay=0.9)
