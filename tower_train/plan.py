"""python -m tower_train.plan: what more towers and more machines would give, computed from a few numbers."""

import dataclasses

from tower_train import console
from tower_train.options import MACHINES, TOWERS, TRAINING, Options, command_line, option

USAGE = """
Predicts how well a training uses more towers: python -m tower_train.plan --params=25.6e6 --flops=12e9 [options]

All of it is computed, by the formulas that the README gives, from the numbers given here; nothing is measured.
"""
CPU, MIRRORED = "cpu", "mirrored"
_GRADIENT_BYTES = {"same": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """Options of `python -m tower_train.plan`."""

    params: float = option(1.068298e6, "trained weights of the network", TRAINING, minimum=1)
    flops: float = option(
        105e6, "floating-point operations of a training example, forwards and backwards", TRAINING, minimum=1
    )
    batch_size: int = option(128, "examples per tower and step", TRAINING, minimum=1)
    towers: int = option(8, "towers that one machine holds", TOWERS, minimum=1)
    tower_flops: float = option(50e12, "operations a second that a tower reaches on this network", TOWERS, minimum=1)
    link: float = option(
        16e9, "bytes a second between a tower's device and the CPU or another device", TOWERS, minimum=1
    )
    host_memory: float = option(50e9, "bytes a second that a machine's CPU reads from its memory", TOWERS, minimum=1)
    all_reduce_dtype: str = option(
        "same", "what gradients are sent in: same (float32), or bfloat16", TOWERS, choices=tuple(_GRADIENT_BYTES)
    )
    workers: int = option(128, "machines, at most", MACHINES, minimum=1)
    bandwidth: float = option(3e9, "bytes a second that a machine sends to another", MACHINES, minimum=1)
    latency: float = option(50e-6, "seconds until the first byte of a message is there", MACHINES, minimum=0)


@dataclasses.dataclass(frozen=True)
class Step:
    """The time that a step takes.

    Attributes:
      compute_secs: of a tower, forwards and backwards.
      local_secs: averaging within a machine and the update.
      ring_secs: averaging between machines.
      ring_bytes: what a machine sends, and receives, in one step.
    """

    compute_secs: float
    local_secs: float
    ring_secs: float
    ring_bytes: float

    @property
    def efficiency(self) -> float:
        """Examples a second, as a share of those of towers that need not wait for each other. Nothing overlaps here."""
        return self.compute_secs / (self.compute_secs + self.local_secs + self.ring_secs)


def step(options: PlanOptions, mode: str, towers: int, workers: int) -> Step:
    """Computes a step of `workers` machines with `towers` each.

    cpu: every tower fetches the weights and brings its gradients over its own link; the CPU reads all gradients.
    mirrored: 2 (towers - 1) / towers of the gradients pass over each link. Between machines in both modes a ring
    of the machines sends 2 (workers - 1) / workers of them, in as many messages of one latency each
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
    """
    weights = 4 * options.params
    sent = _GRADIENT_BYTES[options.all_reduce_dtype] * options.params
    if mode == CPU:
        local = 2 * weights / options.link + (towers + 1) * weights / options.host_memory
    else:
        local = 2 * (towers - 1) / towers * sent / options.link
    ring = 2 * (workers - 1) / workers * sent
    ring_secs = ring / options.bandwidth + 2 * (workers - 1) * options.latency
    return Step(options.batch_size * options.flops / options.tower_flops, local, ring_secs, ring)


def table(options: PlanOptions) -> list[str]:
    """Lists 1, 2, 4, ... towers, as many on a machine as it holds, up to 1,024 or all that there may be."""
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
