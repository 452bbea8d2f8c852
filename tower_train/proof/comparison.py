"""Compares trainings by what is seen after each of their steps, up to what rounding explains."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tower_train import errors
from tower_train.proof.rounding import MOST_NOISE, SEEDS, distance, explained, few_roundings, largest

LOSS, GRADIENT = "the loss", "the gradient of "
STEPS, EACH = 2, 4  # of a comparison of Keras models and Estimators; examples of a tower
_NEGLIGIBLE = 1e-3  # a variable counts as at least this share of the largest weight

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass
class Values:
    """The values after a step, by the names of variables; its losses and gradients, if they are seen."""

    variables: Arrays
    losses: Arrays = dataclasses.field(default_factory=dict)
    gradients: Arrays = dataclasses.field(default_factory=dict)
    is_moved: bool = True  # whether a gradient of the loss was not 0

    def is_finite(self, weights: Collection[str]) -> bool:
        seen = (*self.losses.values(), *self.gradients.values(), *(self.variables[name] for name in weights))
        return all(np.isfinite(each).all() for each in seen)


# seed -> the values after each step of a training whose weights are `rounded` by it at first; None: as they are
Training = Callable[[int | None], Iterable[Values]]


@dataclasses.dataclass(frozen=True)
class Gap:
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
        return self.absolute / self.scale if self.scale else float(self.absolute > 0)

    @property
    def of_largest(self) -> float:
        return self.absolute / max(self.largest, self.scale) if self.scale else float(self.absolute > 0)


def gaps_after(step: int, one: Values, other: Values, weights: Collection[str]) -> list[Gap]:
    """Returns the gaps after a step of two trainings: of the loss, the gradients and then the variables."""
    gradient = max(map(largest, one.gradients.values()), default=0.0)
    weight = max((largest(one.variables[name]) for name in weights), default=0.0)
    kinds = [
        ("", one.losses, other.losses, 0.0, 0.0),
        (GRADIENT, one.gradients, other.gradients, gradient, gradient),
        ("", one.variables, other.variables, _NEGLIGIBLE * weight, weight),
    ]
    return [
        Gap(f"{prefix}{name}", step, distance(value, others[name]), max(least, largest(value)), most)
        for prefix, values, others, least, most in kinds
        for name, value in values.items()
    ]


def earliest(gaps: Sequence[Gap], weights: Collection[str] = ()) -> list[Gap]:
    """Returns the gaps of the earliest step among these: of gradients, of weights and of others, the relatively largest
    first."""
    first = min((gap.step for gap in gaps), default=0)

    def order(gap: Gap) -> tuple:
        return not gap.name.startswith(GRADIENT), gap.name not in weights, -gap.relative

    return sorted((gap for gap in gaps if gap.step == first), key=order)


def beyond(gaps: Iterable[Gap], rounding: float, noise: Mapping[tuple[str, int], float] | None = None) -> list[Gap]:
    """Returns the gaps that rounding does not explain. noise: {(name, step): what it explains, as seen}."""
    noise = noise or {}

    def limit(gap: Gap) -> float:
        return max(few_roundings(rounding) * gap.scale, noise.get((gap.name, gap.step), 0.0))

    return [gap for gap in gaps if gap.absolute > limit(gap)]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a comparison of several towers with one."""

    gap: Gap  # the relatively largest difference
    excess: Sequence[Gap] = ()  # the differences that are more than rounding, of the earliest step
    nothing: str = ""  # why there is nothing to compare

    @property
    def is_noise(self) -> bool:
        """Returns whether roundings explain differences so large that nothing can be told."""
        return not self.excess and self.gap.of_largest > MOST_NOISE


def gaps(one: Iterable[Values], other: Iterable[Values], weights: Collection[str], first: int = 1) -> list[Gap]:
    """Returns the gaps of two trainings after all their steps, of which `first` is the first one's number."""
    steps = enumerate(zip(one, other, strict=True), first)
    return [gap for step, (values, others) in steps for gap in gaps_after(step, values, others, weights)]


def compare(one: Training, several: Training, weights: Collection[str], rounding: float) -> Verdict:
    """Compares a training of several towers with that of one.

    Args:
      one, several: they begin with the same values.
      weights: the names of the variables that are trained.
      rounding: of the arithmetic on the way from the weights to the loss.
    """
    are_finite, are_moved = [], []

    def noting(values: Iterable[Values]) -> Iterator[Values]:
        for each in values:
            are_finite.append(each.is_finite(weights))
            are_moved.append(each.is_moved)
            yield each

    found = gaps(noting(one(None)), several(None), weights)
    gap = max(found, key=lambda each: each.of_largest)
    if not are_finite[0]:
        return Verdict(gap, nothing="the loss is not finite, or its gradients")
    excess = beyond(found, rounding)
    if excess and not beyond(gaps(one(None), one(None), weights), rounding):  # else it draws anew each time
        noise: dict[tuple[str, int], float] = {}
        for seed in SEEDS:
            for near in gaps(one(None), one(seed), weights):
                key = near.name, near.step
                noise[key] = max(explained(near.absolute, seed), noise.get(key, 0.0))
            if not (excess := beyond(excess, rounding, noise)):
                break
    if excess:
        return Verdict(gap, earliest(excess, weights))
    return Verdict(gap, nothing="" if any(are_moved) else "every gradient of the loss is 0")


def line_of_model(
    verdict: Verdict, count: int, size: str, by_tower: Gap | None = None, begins: object | None = None
) -> str:
    """Returns the line for people about a Keras model or an Estimator; GraphError if its towers differ.

    Args:
      count: of the towers.
      size: of the trainings: "2 steps of 8 examples".
      by_tower: the relatively largest difference with batch_norm="tower", if that is how it trains.
      begins: what computes otherwise in towers first, if that is known.
    """
    if verdict.excess:
        where = f"It begins at {begins}. That is" if begins else "A layer or a loss is"
        raise errors.GraphError(
            f"{count} towers differ from one device on this model: {verdict.excess[0]} in step "
            f"{verdict.excess[0].step} ({size}). {where} computed over the examples of a batch, of which a tower has a "
            "part only, or with random numbers by tower, or gradients are clipped before they are averaged."
        )
    if verdict.nothing:
        return f"*** towers: nothing to compare: {verdict.nothing} ({size})"
    apart = f"{verdict.gap.of_largest:.0e}"
    if verdict.is_noise:
        return (
            f"*** {count} towers differ from one device by {apart}, as one device does once its weights are rounded: "
            "this model magnifies roundings so much that nothing can be told"
        )
    if by_tower:
        return (
            f"*** {count} towers are not one device with batch_norm='tower': {by_tower.name} differs by "
            f"{by_tower.of_largest:.0e} on this model, and by {apart} with batch_norm='global' ({size})"
        )
    return f"{count} towers equal one device on this model to {apart} ({size})"


def is_scaled(before: np.ndarray, after: np.ndarray) -> bool:
    """Returns whether an array has not changed but by a factor, as by weight decay alone."""
    before, change = np.float64(before).ravel(), np.float64(after).ravel() - np.float64(before).ravel()
    if before.size < 2 or not change.any():  # any change of a single number is a factor
        return not change.any()
    i = np.abs(before).argmax()
    rate = change[i] / before[i] if before[i] else 0.0
    return largest(change - rate * before) <= 0.01 * largest(change)
