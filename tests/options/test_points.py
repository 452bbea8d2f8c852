"""Points are read as they are written, or refused with what one must be."""

import pytest

from tower_train import errors
from tower_train.config import Config
from tower_train.options import rules


def test_points_are_pairs_of_a_share_and_a_value():
    assert rules.parse_points("0:0.2,0.23:1,1:7e-2") == ((0.0, 0.2), (0.23, 1.0), (1.0, 0.07))
    assert rules.parse_points("0.5:0") == ((0.5, 0.0),)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("0:1:2", "'0:1:2'"),
        ("0:one", "'0:one'"),
        ("0:1,0.5:1,0.5:2", "'0.5:2'"),
        ("-0.1:1,1:2", "'-0.1:1'"),
        ("0:1,1.01:2", "'1.01:2'"),
        ("0:1,1:-1", "'1:-1'"),
        ("0:nan", "'0:nan'"),
        ("nan:1", "'nan:1'"),
        ("0:inf", "'0:inf'"),
    ],
)
def test_what_is_no_point_is_named(text, part):
    with pytest.raises(errors.ConfigError) as refusal:
        Config(lr_schedule="points", lr_points=text)
    assert str(refusal.value).startswith(f"--lr_points={text}: {part} must be SHARE:VALUE, ")
    assert "\n" not in str(refusal.value)
