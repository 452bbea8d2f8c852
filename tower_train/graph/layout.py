"""The layout of a step: towers, devices, copies of the variables, parts of the global batch.

Four towers of one worker, 32 examples each: positions 0 to 31 of a step are tower 0's, 32 to 63 tower 1's, and so on.
"""

import dataclasses

import numpy as np

from tower_train.config import Config
from tower_train.graph.devices import HOST, Devices


@dataclasses.dataclass(frozen=True)
class Tower:
    """One batch of a step and its place."""

    index: int  # over the batches that this worker takes in a step, in the order of their positions
    device: str  # that computes it
    replica: int = 0  # index of the copy of the variables that it uses
    turn: int = 0  # number of batches before it on its device, in the same step


@dataclasses.dataclass(frozen=True)
class Layout:
    """The topology of a step, over all workers."""

    tower_batch: int  # examples per tower
    devices: tuple[str, ...] = (HOST,)  # of this worker's towers; each worker has as many
    replicas: tuple[str, ...] = (HOST,)  # over this worker's copies of the variables, the device of each
    # over workers, the batches that each of its devices takes in a step, one after the other
    batches_per_device: tuple[int, ...] = (1,)
    worker: int = 0  # index of this one

    @property
    def num_workers(self) -> int:
        return len(self.batches_per_device)

    @property
    def towers_per_worker(self) -> tuple[int, ...]:
        """Over workers, the batches that its devices take in a step."""
        return tuple(len(self.devices) * batches for batches in self.batches_per_device)

    @property
    def num_towers(self) -> int:
        """The batches that this worker takes in a step."""
        return self.towers_per_worker[self.worker]

    def places(self, worker: int, in_turns: bool = True) -> list[int]:
        """Returns, over a worker's batches of a step, how many of all workers' come before each.

        in_turns: the batches of all workers' first turns come first, then those of the second turns, as on one device
        that takes as many turns. Else, or if workers take unequally many, all of worker 0's come first.
        """
        here, count, turns = len(self.devices), self.towers_per_worker[worker], self.batches_per_device[worker]
        if self.weight is None and in_turns:
            # batches are normalised over one turn of all workers, so these must be what one device would take
            return [(t * self.num_workers + worker) * here + i for t in range(turns) for i in range(here)]
        return [sum(self.towers_per_worker[:worker]) + i for i in range(count)]

    @property
    def offsets(self) -> np.ndarray:
        """int64 [global_batch], the positions in a step of the examples of all workers, worker by worker."""
        # in the order in which gathered rows of workers arrive
        places = [place for worker in range(self.num_workers) for place in self.places(worker)]
        return np.add.outer(np.int64(places) * self.tower_batch, np.arange(self.tower_batch)).ravel()

    @property
    def worker_batch(self) -> int:
        """Examples of a step in this worker."""
        # towers have equal batches, so that their plain mean is the mean over examples
        return self.tower_batch * self.num_towers

    @property
    def global_batch(self) -> int:
        """Examples of a step in all workers."""
        return self.tower_batch * sum(self.towers_per_worker)

    @property
    def num_replicas(self) -> int:
        """Copies of the variables, over all workers."""
        return len(self.replicas) * self.num_workers

    @property
    def weight(self) -> float | None:
        """This worker's weight in means over workers, 1 on average; None if all weigh the same."""
        if len(set(self.batches_per_device)) == 1:
            return None
        # so that each batch counts alike, not each worker
        return self.batches_per_device[self.worker] * self.num_workers / sum(self.batches_per_device)

    @property
    def towers(self) -> tuple[Tower, ...]:
        """This worker's towers, turn by turn."""
        mirrored = len(self.replicas) > 1  # one copy serves all towers, or each device has its own
        return tuple(
            Tower(turn * len(self.devices) + device, name, replica=device if mirrored else 0, turn=turn)
            for turn in range(self.batches_per_device[self.worker])
            for device, name in enumerate(self.devices)
        )


def lay_out(devices: Devices, config: Config) -> Layout:
    """Lays a step out on a worker's devices."""
    # an elastic step has the same batches whoever is there, so that the training does not depend on it
    batches = config.accumulate_steps * (config.most_workers or devices.num_workers)
    # towers on the CPU share its memory; GPUs would fetch all weights each step, also a single one
    replicas = devices.towers if config.variable_update == "mirrored" else (HOST,)
    shares = share_out(batches, devices.num_workers)
    return Layout(config.tower_batch, devices.towers, replicas, shares, devices.worker)


def share_out(batches: int, num_workers: int) -> tuple[int, ...]:
    """Returns over workers how many of a step's batches each takes; the chief, which has more to do, the fewest.

    >>> share_out(8, 3)
    (2, 3, 3)
    """
    each, left_over = divmod(batches, num_workers)  # whole batches: a divided one would be normalised otherwise
    return tuple(each + (worker >= num_workers - left_over) for worker in range(num_workers))
