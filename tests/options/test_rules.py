"""Where a user gives another option than a recipe, what the recipe has for its own goes."""

import pytest

from tower_train import errors
from tower_train.config import Config, EvaluateOptions
from tower_train.options import rules
from tower_train.workload import Workload

RECIPE = dict(epochs=9.9, optimizer="momentum", momentum=0.85, nesterov=True, lr_schedule="points",
              lr_points="0:1,1:0", lookahead_every_steps=5, lookahead_decay=0.7, lookahead_ramp=3.0)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (dict(max_steps=5), {"epochs"}),
        (dict(optimizer="adam"), {"nesterov", "momentum"}),
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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(momentum=0.8), "--momentum=0.8 is for --optimizer=momentum or lars, not for sgd."),
        (dict(momentum=0.8, optimizer="adam"), "--momentum=0.8 is for --optimizer=momentum or lars, not for adam."),
        (dict(lr_base_batch=64), "--lr_base_batch=64 is for --lr_scaling=linear or sqrt."),
        (dict(max_nonfinite_in_a_row=3), "--max_nonfinite_in_a_row=3 is for --on_nonfinite=skip."),
        (dict(train_eval_examples=50), "--train_eval_examples=50 is for evaluations during training. Say when with"),
    ],
)
def test_an_option_without_the_one_that_it_is_for_is_refused(given, text):
    with pytest.raises(errors.ConfigError) as error:
        Config(**given)
    assert str(error.value).startswith(text)


def test_what_is_as_by_default_is_no_mistake():
    Config(momentum=0.9, lr_base_batch=128, max_nonfinite_in_a_row=10, train_eval_examples=1000, nesterov=False)
    Config(train_eval_examples=0)
    Config(train_eval_examples=50, eval_at_end=True)


def test_how_often_to_look_needs_that_somebody_looks():
    with pytest.raises(errors.ConfigError, match=r"^--watch_secs=1 is for --watch\. Give that too\.$"):
        EvaluateOptions(train_dir="runs/x", watch_secs=1.0)
