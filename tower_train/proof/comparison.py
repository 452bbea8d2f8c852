"""The comparison of several towers with one device, before a first training: of workloads, Keras models and Estimators.

The caller says how to train and where towers differ. What rounding explains of a difference after a step is none.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tower_train import console, errors, host

LOSS, GRADIENT = "the loss", "the gradient of "
STEPS, EACH = 2, 4  # of a comparison; examples of a tower
MOST_TOWERS = 4  # more would show nothing else
SECS_OF_NUMBER = 3e-7  # to read and compare a number of what trainings yield, as it was seen
_LONG_SECS = 10
# Of trainings that begin with rounded weights. Several, as Adam takes whole steps by gradients that are only rounding,
# such as that of a bias before batch normalisation. Each starts further away, as kernels round more than once, and a
# ReLU that flips shows only from further away.
_SEEDS = range(4)
_SENSITIVITY = 100  # differences that are at most this times what one rounding of each weight changes are none
_FEW_ROUNDINGS = 256
_MOST_NOISE = 1e-3  # of towers that are said to be equal
_NEGLIGIBLE = 1e-3  # a variable counts as at least this share of the largest weight

Arrays = Mapping[str, np.ndarray]


class Values(NamedTuple):
    """The losses, mean gradients and variables after a step, by names; the variables before the first step."""

    losses: Arrays
    gradients: Arrays
    variables: Arrays


# Begins with these values of variables, and its own of others; yields the values at first and after each step.
Training = Callable[[Arrays], Iterable[Values]]


class Gap(NamedTuple):
    """The distance between two values of one quantity after a step."""

    name: str
    step: int
    absolute: float  # the largest difference
    scale: float  # the largest number of the first value, or at least a share of the largest of its kind
    largest: float  # the largest number of its kind: of the gradients, or of the weights

    def __str__(self) -> str:
        return f"{self.name} by {self.relative:.0e}" if np.isfinite(self.absolute) else f"{self.name} (inf or NaN)"

    @property
    def relative(self) -> float:
        """The difference as a share of the quantity itself."""
        return self.absolute / self.scale if self.scale else float(self.absolute > 0)

    @property
    def proportion(self) -> float:
        """The difference as a share of the largest of its kind."""
        return self.absolute / max(self.largest, self.scale) if self.scale else float(self.absolute > 0)


class Outcome(NamedTuple):
    """The result of a comparison; run.json has its fields."""

    line: str  # for people
    towers: int = 0
    differs: str = ""  # by how much towers differ and where that begins; empty if they do not
    # Gap.proportion of the largest difference; if towers differ, Gap.relative of the first that is more than rounding,
    # None if that is not finite
    relative: float | None = None
    compared: str = ""  # "2 steps of 8 examples, float64"

    def proved(self, advice: str = "") -> "Outcome":
        """Returns this; GraphError with this advice if towers differ."""
        if self.differs:
            raise errors.GraphError(self.differs + advice)
        return self


def model_differs(*_, begins: object | None = None) -> str:
    """Says where towers of a Keras model or an Estimator differ. begins: what computes otherwise first, if known."""
    where = f"It begins at {begins}. That is" if begins else "A layer or a loss is"
    return (
        f"{where} computed over the examples of a batch, of which a tower has a part only, or with random numbers by "
        "tower, or gradients are computed and clipped within a loop or a tf.function. Where a loss is divided by a sum "
        "over the batch, as of a mask, divide it by steps.mean of that (from tower_train import steps)."
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A training of several towers and the same on one device, which begin with the same values."""

    one: Training
    several: Training
    weights: Collection[str]  # names of the variables that are trained
    dtype: np.dtype  # the least exact of the arithmetic on the way from the weights to the loss
    towers: int
    compared: str  # as in Outcome
    # (gaps of the earliest step, what a resumed training began with, if that differs) -> where the difference begins
    where: Callable[[Sequence[Gap], Arrays | None], str] = model_differs
    by_tower: Training | None = None  # as `several`, whose batches are normalised by tower, if they train so
    resumes: bool = False  # whether a training may keep something outside of its variables
    alone: str = "1"  # in words

    def outcome(self) -> Outcome:
        """Does the steps and compares them."""
        whole = list(self.one({}))
        weights = [whole[1].variables[name] for name in self.weights]
        seen = *whole[1].losses.values(), *whole[1].gradients.values(), *weights
        if not all(np.isfinite(each).all() for each in seen):
            return self._undecided("nothing to compare: the loss is not finite, or its gradients")
        gaps = self._gaps(whole, self.several({}))
        gap = max(gaps, key=lambda each: each.proportion)
        begun = whole[1].variables  # a resumed training goes on from there
        resumed = itertools.islice(self.one(begun) if self.resumes else (), 1, None)
        if excess := self._beyond(self._gaps(whole[2:], resumed, first=2)):
            return self._differing(excess, begun)
        if excess := self._unexplained(whole, gaps):
            return self._differing(excess)
        if all(is_scaled(whole[0].variables[name], whole[-1].variables[name]) for name in self.weights):
            return self._undecided("nothing to compare: every gradient of the loss is 0")
        apart = f"{gap.proportion:.0e}"
        if gap.proportion > _MOST_NOISE:
            return self._undecided(
                f"several differ from one by {apart}, as one does once its weights are rounded: this network magnifies "
                "roundings so much that nothing can be told"
            )
        line = f"towers:   {self.towers} equal {self.alone} on this network to {apart}"
        if self.by_tower and (excess := self._beyond(self._gaps(whole, self.by_tower({})))):
            most = max(excess, key=lambda each: each.proportion)
            line = (
                f"*** towers: {self.towers} are not 1 with batch_norm=tower: {most.name} differs by "
                f"{most.proportion:.0e} on this network, and by {apart} with batch_norm=global"
            )
        return Outcome(line, self.towers, relative=gap.proportion, compared=self.compared)

    def _undecided(self, why: str) -> Outcome:
        return Outcome(f"*** towers: {why}", self.towers, compared=self.compared)

    def _differing(self, excess: Sequence[Gap], begun: Arrays | None = None) -> Outcome:
        """begun: what a resumed training began with, if that differs; else towers do."""
        first = min(gap.step for gap in excess)

        def order(gap: Gap) -> tuple:  # gradients, weights and others, each the relatively largest first
            return not gap.name.startswith(GRADIENT), gap.name not in self.weights, -gap.relative

        gap, *others = excess = sorted((gap for gap in excess if gap.step == first), key=order)
        seen = " and ".join(map(str, [gap, *(other for other in others if other.name == LOSS)]))
        who = "a resumed training differs from a whole one" if begun else f"{self.towers} towers differ from 1"
        differs = f"{who} on this network: {seen} in step {first} ({self.compared}).\n{self.where(excess, begun)}"
        relative = gap.relative if math.isfinite(gap.relative) else None
        return Outcome("", self.towers, differs, relative, self.compared)

    def _gaps(self, one: Iterable[Values], other: Iterable[Values], first: int = 0) -> list[Gap]:
        """Returns the gaps of the losses, gradients and variables of two trainings. first: the first step."""
        gaps = []
        for step, (mine, others) in enumerate(zip(one, other, strict=False), first):
            gradient = max(map(largest, mine.gradients.values()), default=0.0)
            weight = max((largest(mine.variables[name]) for name in self.weights), default=0.0)
            kinds = ("", 0.0, 0.0), (GRADIENT, gradient, gradient), ("", _NEGLIGIBLE * weight, weight)
            for values, theirs, (prefix, least, most) in zip(mine, others, kinds, strict=True):
                for name, value in values.items():
                    scale = max(least, largest(value))
                    gaps.append(Gap(f"{prefix}{name}", step, distance(value, theirs[name]), scale, most))
        return gaps

    def _beyond(self, gaps: Iterable[Gap], noise: Mapping[tuple[str, int], float] | None = None) -> list[Gap]:
        """Returns the gaps that rounding does not explain. noise: {(name, step): what it explains, as seen}."""
        few, noise = min(max(_FEW_ROUNDINGS * epsilon(self.dtype), 1e-10), _MOST_NOISE), noise or {}
        return [gap for gap in gaps if gap.absolute > max(few * gap.scale, noise.get((gap.name, gap.step), 0.0))]

    def _unexplained(self, whole: Sequence[Values], gaps: Iterable[Gap]) -> list[Gap]:
        """Returns the gaps that are more than one training's, once its weights are rounded in several ways."""
        excess = self._beyond(gaps)
        if not excess or self._beyond(self._gaps(whole, self.one({}))):  # it draws anew each time: that is no rounding
            return excess
        noise: dict[tuple[str, int], float] = {}
        for seed in _SEEDS:
            begin = {name: rounded(whole[0].variables[name], epsilon(self.dtype), seed) for name in self.weights}
            for near in self._gaps(whole, self.one(begin)):
                key = near.name, near.step
                noise[key] = max(_SENSITIVITY / 4**seed * near.absolute, noise.get(key, 0.0))
            if not (excess := self._beyond(excess, noise)):
                break
        return excess


def epsilon(dtype: np.dtype) -> float:
    """Returns the relative step between the numbers of a type, bfloat16 included; 0 for whole numbers and booleans."""
    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def rounded(value: np.ndarray, rounding: float, seed: int) -> np.ndarray:
    """Returns a value with each number moved by 4**seed roundings to one side or the other.

    A matrix of zeros is moved as if it were ones: before it moves, gradients may cancel except for their roundings,
    which rounding other weights does not show. A bias of zeros is not, as it may be at the kink of an activation.
    """
    moves = rounding * 4**seed * np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return (value * (1 + moves) if value.ndim < 2 or value.any() else moves).astype(value.dtype)


def largest(value) -> float:
    """Returns the largest finite magnitude in an array."""
    value = np.abs(np.asarray(value))
    found = value.max(initial=0)
    return float(found if np.isfinite(found) else value[np.isfinite(value)].max(initial=0))


def wide(value) -> np.ndarray:
    """Returns an array of numbers in complex128 or float64."""
    value = np.asarray(value)
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64, copy=False)


def distance(one, other) -> float:
    """Returns the largest difference of two arrays; inf if it is not finite where they differ."""
    one, other = wide(one), wide(other)
    with np.errstate(invalid="ignore"):
        absolute = np.abs(one - other).max(initial=0)
        if not np.isfinite(absolute):  # both may be: that is no difference
            apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0, np.abs(one - other))
            absolute = np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0)
    return float(absolute)


def is_scaled(before: np.ndarray, after: np.ndarray) -> bool:
    """Returns whether an array is the same except for a factor, as after weight decay alone."""
    before = wide(before).ravel()
    change = wide(after).ravel() - before
    if not change.any() or not np.ptp(before):  # any change of a single number, or of equal ones, may be a factor
        return not change.any()
    i = np.abs(before).argmax()
    rate = change[i] / before[i]
    return largest(change - rate * before) <= 0.01 * largest(change)


def in_dtypes(dtypes: Iterable[str | None], compare: Callable[[str | None], Outcome]) -> Outcome:
    """Returns the outcome in the first of these dtypes in which the network can be computed; its line says how long it
    took, and why it is not float64."""
    began, refusals = time.perf_counter(), []
    for dtype in dict.fromkeys(dtypes):
        try:
            outcome = compare(dtype)
            break
        except errors.UserError:
            raise
        except Exception as error:  # whatever a network raises, or TensorFlow without a kernel
            refusals.append(error)
    else:
        raise refusals[0]  # the others are of dtypes that it may not be made for
    why = f". In float64: {errors.reason(refusals[0])}" if refusals else ""
    if outcome.differs:
        differs = f"{outcome.differs.removesuffix('.')}{why}."
        return outcome._replace(line=f"*** {differs}", differs=differs)
    return outcome._replace(line=f"{outcome.line} ({outcome.compared}; {time.perf_counter() - began:.1f} s){why}")


def before_training(compare: Callable[[], Outcome], how_not: str) -> Outcome:
    """Returns the outcome of a comparison that nobody asked for; one that cannot be made is left out.

    Raises:
      GraphError: towers differ, and the message says how to train all the same, by the option `how_not` (empty if that
        is given); or they cannot be built, which the training could not either.
    """
    try:
        outcome = compare()
    except errors.GraphError:
        raise
    except Exception as error:  # whatever a model raises of few examples; the training raises what it does of all
        return Outcome(f"*** towers: not compared with one device, as that fails: {errors.reason(error)}")
    return outcome.proved(f"\nChange that, or train all the same with {how_not}.") if how_not else outcome


def announce(count: int, seconds: float, how_not: str, say: Callable[[str], None] = console.say) -> bool:
    """Tells of a comparison if it takes long; returns whether it does. how_not: the option that leaves it out."""
    if seconds > _LONG_SECS:
        say(f"towers:   comparing {count} with 1, for about {seconds:.0f} s ({how_not} leaves it out)")
    return seconds > _LONG_SECS


def check_memory(numbers: int, dtype: str | None) -> None:
    """Raises MemoryError if so many numbers in variables leave no place for several trainings, and what is fetched of
    each. dtype: of the comparison."""
    needed = 8 * numbers * (8 if dtype == "float64" else 4)  # eight times, as seen
    if needed > (host.free_memory() or needed):
        raise MemoryError(f"{numbers:,} numbers in variables would take {needed / 2**30:.0f} GiB of memory")


def examples_of_tower(there: int, count: int) -> int:
    """Returns how many of the examples a tower takes in a step; ConfigError if they are too few."""
    if there < STEPS * count:
        raise errors.ConfigError(
            f"check: there are fewer than {STEPS * count} examples, one for each of {count} towers in {STEPS} steps."
        )
    return min(EACH, there // (STEPS * count))
