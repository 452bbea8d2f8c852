"""From samples to rows: medians, spreads, and ratios that are taken round by round."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tower_train.bench.rounds import Measured


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      name: the side's.
      per_sec: examples a second, the median over rounds; for a ceiling, what it would be if a step were nothing but the
        network's products.
      low, high: its quartiles.
      ratio: to the reference, the median over rounds of the ratio within a round; None without a reference.
      share: of the ceiling of the same arithmetic, likewise; None where it is not known.
      peak_bytes: resident memory of its process; None for a ceiling.
      first_step_secs: from the start of its process; None for a ceiling.
    """

    name: str
    per_sec: float
    low: float
    high: float
    ratio: float | None
    share: float | None
    peak_bytes: int | None
    first_step_secs: float | None


def rows(measured: Sequence[Measured], reference: str | None, flops_per_example: float | None) -> list[Row]:
    """A row for each side; none for ceilings where the network's arithmetic is not known.

    Args:
      measured: what came out.
      reference: name of the side that ratios are taken to; it need not be there.
      flops_per_example: the network's arithmetic; None where it is not known.
    """
    if flops_per_example is None:
        measured = [one for one in measured if not is_ceiling(one)]
    rates = {one.side.name: rates_by_round(one, flops_per_example) for one in measured}
    ceilings = {one.side.dtype: rates[one.side.name] for one in measured if is_ceiling(one)}
    found = []
    for one in measured:
        own = rates[one.side.name]
        low, high = quartiles(list(own.values()))
        ratio, share = median_ratio(own, rates.get(reference, {})), median_ratio(own, ceilings.get(one.side.dtype, {}))
        costs = (None, None) if is_ceiling(one) else (one.peak_bytes, one.first_step_secs)
        found.append(Row(one.side.name, statistics.median(own.values()), low, high, ratio, share, *costs))
    return found


def is_ceiling(measured: Measured) -> bool:
    return measured.side.kind == "matmul"


def rates_by_round(measured: Measured, flops_per_example: float | None = None) -> dict[int, float]:
    """Examples a second by round; of a ceiling, as many as its operations a second are enough for."""
    per_example = flops_per_example if is_ceiling(measured) else 1
    return {sample["round"]: sample["per_sec"] / per_example for sample in measured.samples}


def median_ratio(rates: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    """The median of the ratios over the rounds that are in both; None where there are none."""
    ratios = [rate / base[number] for number, rate in rates.items() if number in base]
    return statistics.median(ratios) if ratios else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile, interpolated linearly as numpy does by default."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
