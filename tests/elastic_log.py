"""Reads from the log of soak_workload which examples an elastic cluster was trained on."""

import collections


def trained(log, global_batch, steps):
    """The examples of the steps that count: those of the last start of the chief that did a step.

    A start of another worker is of the start of the chief that last built its graph before the worker's first batch.

    Args:
      log: path of the log of all workers.
      global_batch: examples a step.
      steps: the last.

    Returns:
      {step, from 0: its positions, in order}; over starts of the chief that did a step, the number of workers.
    """
    chief, chief_of, lines = None, {}, []
    for words in map(str.split, log.read_text().splitlines()):
        if words[0] == "chief":
            chief = words[1]
            continue
        first, count, start = int(words[1]), int(words[2]), words[3]
        chief_of.setdefault(start, chief)
        lines.append((first // global_batch, first, count, start))
    last = {step: start for step, _, _, start in lines if chief_of[start] == start}
    positions = collections.defaultdict(list)
    for step, first, count, start in lines:
        if step < steps and chief_of[start] == last.get(step):
            positions[step] += range(first, first + count)
    sizes = collections.Counter(chief_of.values())
    return {step: sorted(found) for step, found in positions.items()}, [
        sizes[start] for start in chief_of if chief_of[start] == start
    ]
