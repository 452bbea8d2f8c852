"""Comparisons before a first training, of workloads, Keras models and Estimators: the parts that are alike."""

import contextlib
from collections.abc import Callable

from tower_train import console, errors
from tower_train.proof.comparison import Verdict

STEPS, EACH = 2, 4  # of a comparison of Keras models and Estimators; examples of a tower
MOST_TOWERS = 4  # more would show nothing else
_LONG_SECS = 10


class _DifferError(errors.GraphError):
    """Towers differ from one device, and would train all the same."""


def announce(count: int, seconds: float, how_not: str, say: Callable[[str], None] = console.say) -> bool:
    """Tells of a comparison if it takes long; returns whether it does. how_not: the option that leaves it out."""
    if seconds > _LONG_SECS:
        say(f"towers:   comparing {count} with 1, for about {seconds:.0f} s ({how_not} leaves it out)")
    return seconds > _LONG_SECS


def before_training(compare: Callable[[], str], how_not: str) -> str:
    """Returns the line of a comparison that nobody asked for; one that cannot be made is left out.

    Args:
      compare: returns the line.
      how_not: the option that leaves it out.

    Raises:
      GraphError: towers differ, and the message says how to train all the same; or they cannot be built, which the
        training could not either.
    """
    try:
        return compare()
    except _DifferError as error:
        raise errors.GraphError(f"{error} Change that, or train all the same with {how_not}.") from None
    except errors.GraphError:
        raise
    except Exception as error:  # whatever a model raises of few examples; the training raises what it does of all
        return f"*** towers: not compared with one device, as that fails: {errors.reason(error)}"


def in_float64(
    compare: Callable[[str | None], str], float64: contextlib.AbstractContextManager, own: str | None
) -> str:
    """Returns the line of a comparison in float64, within a context, if that can be, else in the model's own dtype."""
    try:
        with float64:
            return compare("float64")
    except errors.UserError:
        raise
    except Exception as error:  # whatever a layer or a model_fn raises, or TensorFlow without a kernel
        reason = errors.reason(error)
    return f"{compare(own)}. In float64: {reason}"


def examples_of_tower(there: int, count: int) -> int:
    """Returns how many of the examples a tower takes in a step; ConfigError if they are too few."""
    if there < STEPS * count:
        raise errors.ConfigError(
            f"check: there are fewer than {STEPS * count} examples, one for each of {count} towers in {STEPS} steps."
        )
    return min(EACH, there // (STEPS * count))


def line_of_model(verdict: Verdict, count: int, about: str, begins: object | None = None) -> str:
    """Returns the line for people about a Keras model or an Estimator; GraphError if its towers differ.

    Args:
      count: of the towers.
      about: what was compared, "2 steps of 8 examples".
      begins: what computes otherwise in towers first, if that is known.
    """
    if not verdict.excess:
        return verdict.line(count, about)
    where = f"It begins at {begins}. That is" if begins else "A layer or a loss is"
    raise _DifferError(
        f"{count} towers differ from 1 on this network: {verdict.differs} ({about}). {where} computed over the "
        "examples of a batch, of which a tower has a part only, or with random numbers by tower, or gradients "
        "are computed and clipped within a loop or a tf.function."
    )
