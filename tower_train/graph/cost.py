"""The time of a step by arithmetic: computing, and averaging within a machine and between machines."""

import dataclasses

from tower_train.config import PlanOptions

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
