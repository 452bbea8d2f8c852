"""python -m tower_train.plan: the use of more towers and machines, computed from a few numbers."""

from tower_train import console
from tower_train.config import PlanOptions
from tower_train.graph.cost import CPU, MIRRORED, step
from tower_train.options import command_line

USAGE = """
Predicts how well a training uses more towers: python -m tower_train.plan --params=25.6e6 --flops=12e9 [options]

All of it is computed from these options by the formulas of docs/scaling.md; nothing is measured.
"""


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
