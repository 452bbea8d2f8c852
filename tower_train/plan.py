"""python -m tower_train.plan: the use of more towers and machines, computed from a few numbers."""

import dataclasses

from tower_train import console
from tower_train.config import PlanOptions
from tower_train.options import command_line

USAGE = """
Predicts how well a training uses more towers: python -m tower_train.plan --params=25.6e6 --flops=12e9 [options]

All of it is computed from these options by the formulas of docs/scaling.md; nothing is measured.
"""

CPU, MIRRORED = "cpu", "mirrored"
_GRADIENT_BYTES = {"same": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Step:
    """The time of a step.

    Attributes:
      compute_secs: of a tower, forward and backward.
      local_secs: averaging within a machine and the update.
      ring_secs: averaging between machines.
      ring_bytes: sent, and received, by a machine in one step.
    """

    compute_secs: float
    local_secs: float
    ring_secs: float
    ring_bytes: float

    @property
    def efficiency(self) -> float:
        """Examples/sec relative to towers that need not wait for each other. Nothing overlaps here."""
        return self.compute_secs / (self.compute_secs + self.local_secs + self.ring_secs)


def step(options: PlanOptions, mode: str, towers: int, workers: int) -> Step:
    """Computes a step of `workers` machines with `towers` each.

    cpu: every tower fetches the weights and brings its gradients over its own link; the CPU reads all gradients.
    mirrored: all devices begin, and 2 (towers - 1) / towers of the gradients pass over each link. Between machines in
    both modes a ring of the machines sends 2 (workers - 1) / workers of them, in as many messages of one latency each
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
    """
    weights = 4 * options.params
    sent = _GRADIENT_BYTES[options.all_reduce_dtype] * options.params
    if mode == CPU:
        local = 2 * weights / options.link + (towers + 1) * weights / options.host_memory
    else:
        local = (options.launch if towers > 1 else 0) + 2 * (towers - 1) / towers * sent / options.link
    ring = 2 * (workers - 1) / workers * sent
    ring_secs = ring / options.bandwidth + 2 * (workers - 1) * options.latency
    return Step(options.batch_size * options.flops / options.tower_flops, local, ring_secs, ring)


def table(options: PlanOptions) -> list[str]:
    """Tabulates 1, 2, 4, ... towers, as many per machine as it holds, up to 1,024 or all."""
    lines = ["towers  machines  examples/step  sent MB/step  cpu: ms/step  used  mirrored: ms/step  used  use"]
    total = 1
    while total <= min(1024, options.towers * options.workers):
        towers, workers = min(total, options.towers), -(-total // options.towers)
        steps = {mode: step(options, mode, towers, workers) for mode in (CPU, MIRRORED)}
        cells = "".join(
            f"{1e3 * sum((s.compute_secs, s.local_secs, s.ring_secs)):>{width}.2f}{s.efficiency:>6.0%}"
            for s, width in ((steps[CPU], 14), (steps[MIRRORED], 19))
        )
        best = max(steps, key=lambda mode: steps[mode].efficiency)
        batch, sent = towers * workers * options.batch_size, steps[CPU].ring_bytes / 1e6
        lines.append(f"{towers * workers:>6}{workers:>10}{batch:>15}{sent:>14.2f}{cells}  {best}")
        total *= 2
    return lines


def main(argv) -> int:
    options = command_line.parse(argv, PlanOptions, USAGE)
    console.say("Computed, not measured. `used`: the share of the towers' time in which they compute.", *table(options))
    return 0


if __name__ == "__main__":
    command_line.run(main)
