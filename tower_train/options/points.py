"""A piecewise linear course of a number over a training, as text: share:value,share:value,..."""

import math

from tower_train import errors


def parse(text: str, name: str) -> tuple[tuple[float, float], ...]:
    """Reads e.g. 0:0.2,0.23:1,1:0.07.

    Args:
      text: points, each a share of the training and a value.
      name: the option that it is of, for messages.

    Returns:
      Over points, (share, value): shares from 0 to 1 that rise, values of at least 0.

    Raises:
      ConfigError: the text is not of this form.
    """
    points, before = [], -math.inf
    for part in text.split(","):
        try:
            share, value = map(float, part.split(":"))
        except ValueError:
            share = value = math.nan
        if not (0 <= share <= 1 and share > before and 0 <= value < math.inf):
            raise errors.ConfigError(
                f"--{name}={text}: {part!r} must be SHARE:VALUE, the share of the training from 0 to 1 and greater "
                "than the one before, the value at least 0, as in 0:0.2,0.23:1,1:0.07."
            )
        points.append((share, value))
        before = share
    return tuple(points)
