"""Compares trainings by what is seen after each of their steps, up to what rounding explains."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from tower_train.proof.rounding import MOST_NOISE, SEEDS, distance, explained, few_roundings, largest

LOSS, GRADIENT = "the loss", "the gradient of "
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
    def proportion(self) -> float:
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
    undecided: str = ""  # why nothing can be told
    by_tower: Gap | None = None  # the largest difference with batch_norm="tower", if the towers train so

    @property
    def differs(self) -> str:
        """The first excess and the loss, in words; empty if nothing differs."""
        loss = [gap for gap in self.excess[1:] if gap.name == LOSS]
        return f"{' and '.join(map(str, [self.excess[0], *loss]))} in step {self.excess[0].step}" if self.excess else ""

    def line(self, count: int, about: str, one: str = "1") -> str:
        """Returns the line for people if nothing differs. about: what was compared, "2 steps of 8 examples"."""
        if self.undecided:
            return f"*** towers: {self.undecided} ({about})"
        apart = f"{self.gap.proportion:.0e}"
        if self.by_tower:
            return (
                f"*** towers: {count} are not 1 with batch_norm=tower: {self.by_tower.name} differs by "
                f"{self.by_tower.proportion:.0e} on this network, and by {apart} with batch_norm=global ({about})"
            )
        return f"towers:   {count} equal {one} on this network to {apart} ({about})"


def gaps(one: Iterable[Values], other: Iterable[Values], weights: Collection[str], first: int = 1) -> list[Gap]:
    """Returns the gaps of two trainings after all their steps, of which `first` is the first one's number."""
    steps = enumerate(zip(one, other, strict=True), first)
    return [gap for step, (values, others) in steps for gap in gaps_after(step, values, others, weights)]


def compare(
    one: Training, several: Training, weights: Collection[str], rounding: float, by_tower: Training | None = None
) -> Verdict:
    """Compares a training of several towers with that of one.

    Args:
      one, several: they begin with the same values.
      weights: the names of the variables that are trained.
      rounding: of the arithmetic on the way from the weights to the loss.
      by_tower: as `several`, whose batches are normalised by tower, if they train so.
    """
    whole = list(one(None))
    found = gaps(whole, several(None), weights)
    gap = max(found, key=lambda each: each.proportion)
    if not whole[0].is_finite(weights):
        return Verdict(gap, undecided="nothing to compare: the loss is not finite, or its gradients")
    excess = beyond(found, rounding)
    if excess and not beyond(gaps(whole, one(None), weights), rounding):  # else it draws anew each time
        noise: dict[tuple[str, int], float] = {}
        for seed in SEEDS:
            for near in gaps(whole, one(seed), weights):
                key = near.name, near.step
                noise[key] = max(explained(near.absolute, seed), noise.get(key, 0.0))
            if not (excess := beyond(excess, rounding, noise)):
                break
    if excess:
        return Verdict(gap, earliest(excess, weights))
    if not any(each.is_moved for each in whole):
        return Verdict(gap, undecided="nothing to compare: every gradient of the loss is 0")
    if gap.proportion > MOST_NOISE:
        why = (
            f"several differ from one by {gap.proportion:.0e}, as one does once its weights are rounded: this network "
            "magnifies roundings so much that nothing can be told"
        )
        return Verdict(gap, undecided=why)
    apart = beyond(gaps(whole, by_tower(None), weights), rounding) if by_tower else []
    return Verdict(gap, by_tower=max(apart, key=lambda each: each.proportion, default=None))


def is_scaled(before: np.ndarray, after: np.ndarray) -> bool:
    """Returns whether an array has not changed but by a factor, as by weight decay alone."""
    before, change = np.float64(before).ravel(), np.float64(after).ravel() - np.float64(before).ravel()
    if not change.any() or not np.ptp(before):  # any change of a single number, or of equal ones, may be a factor
        return not change.any()
    i = np.abs(before).argmax()
    rate = change[i] / before[i] if before[i] else 0.0
    return largest(change - rate * before) <= 0.01 * largest(change)
