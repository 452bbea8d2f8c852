"""Shows on a run's own network that its towers are one: a few small steps with one tower and with several.

The steps are on the first examples of the run, on the host, in float64 if the network follows --dtype. With
--batch_norm=tower towers differ by design: then two comparisons tell by how much, and that nothing else does.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train.config import Config
from tower_train.data.arrays import fetcher
from tower_train.examples import Examples
from tower_train.graph.random_state import source_line
from tower_train.graph.record import TrainingGraph
from tower_train.proof import comparison, operations
from tower_train.proof.comparison import GRADIENT, LOSS, STEPS, Arrays, Gap, Outcome
from tower_train.proof.operations import Trial
from tower_train.workload import Workload

_MOST_BATCHES = 2  # of a tower with --check_towers=auto; more would show nothing else
_MOST_COMPILED = 600  # operations of a tower; XLA takes many seconds to compile more for a CPU
_OURS = [pathlib.Path(__file__).parents[2] / name for name in ("cifar10", "tower_train")]  # which the tests compare


def is_due(config: Config, import_path: str | None, stateful: Sequence[str] = ()) -> bool:
    """Returns whether a new run is compared with one tower.

    Args:
      config: of the run.
      import_path: of its workload; None if it has none.
      stateful: operations that draw from a state of their own, which are allowed; the log tells that towers differ.
    """
    if config.check_towers != "auto" or stateful:
        return config.check_towers.isdecimal()
    file = getattr(sys.modules.get((import_path or "").partition(":")[0]), "__file__", None)  # names may be a user's
    is_ours = file is not None and any(pathlib.Path(file).is_relative_to(folder) for folder in _OURS)
    return config.batches_per_step > 1 and not is_ours


def compare_towers(workload: Workload, examples: Examples, config: Config, graph: TrainingGraph) -> Outcome:
    """Compares two steps of a run's towers with those of one tower. graph: which the run will train by.

    Raises GraphError if they differ, and config.allow_differences is not set, or a rule of the towers is broken.
    """
    several, one = _configs(config, graph)
    if one.batches_per_step == several.batches_per_step:
        return Outcome(
            f"*** towers: nothing to compare: there is one, whose {config.accumulate_steps} batches of a step are "
            "normalised each by itself, which one batch of all is not"
        )
    examples, is_by_tower = _at_hand(examples, STEPS * several.global_batch), config.batch_norm == "tower"

    def compare(dtype: str) -> Outcome:
        comparison.check_memory(sum(v.shape.num_elements() or 0 for v in graph.saved.variables), dtype)

        def make(config: Config, **changes) -> Trial:
            return Trial(workload, examples, dataclasses.replace(config, dtype=dtype, **changes))

        return _compared(make, several, one, config.jit_compile, is_by_tower and graph.compared.normalizes)

    compare_once = lambda: comparison.in_dtypes(["float64", "float32", config.dtype], compare)  # noqa: E731
    return comparison.before_training(compare_once, "" if config.allow_differences else "--allow_differences")


def _tower_ops(graph: TrainingGraph) -> list[tf.Operation]:
    return [op for op in graph.graph.get_operations() if op.name.startswith("tower_0/")]


def _configs(config: Config, graph: TrainingGraph) -> tuple[Config, Config]:
    """Returns the options of a small training with several towers, and those of one tower.

    Towers take batches in turn as in the run. If these are normalised, each by itself, the one tower has as many.
    """
    layout, normalizes = graph.layout, graph.compared.normalizes
    devices, batches = len(layout.devices) * layout.num_workers, min(config.accumulate_steps, _MOST_BATCHES)
    if config.check_towers != "auto":
        devices, batches = int(config.check_towers), 1
    devices = min(devices, comparison.MOST_TOWERS) if config.check_towers == "auto" else devices
    # Batch statistics of two examples magnify roundings beyond measure; some programs cannot take one example.
    each = min(comparison.EACH, layout.tower_batch)
    turns = batches if normalizes else 1
    mirrored = devices > 1 and (config.variable_update == "mirrored" or layout.num_workers > 1)
    several = dataclasses.replace(
        config,
        device="cpu",
        num_gpus=devices,
        gpus=None,
        batch_size=each,
        global_batch_size=None,
        accumulate_steps=batches,
        variable_update="mirrored" if mirrored else "cpu",
        all_reduce=None,
        check_mirrors_every_steps=0,
        augment_on="auto",
        worker_hosts=None,
        task_index=None,
        elastic=None,
        wait_for_workers=False,
        batch_norm="global",
        summary_every_steps=0,
        stall_timeout_secs=0,
        keep_hardest=None,
        jit_compile=config.jit_compile if len(_tower_ops(graph)) <= _MOST_COMPILED else "never",
    )
    one = dataclasses.replace(
        several,
        num_gpus=1,
        accumulate_steps=turns,
        variable_update="cpu",
        batch_size=each * devices * batches // turns,
    )
    return several, one


def _at_hand(examples: Examples, count: int) -> Examples:
    """Returns examples by index: the first of a data set in an order of its own, which each session would read anew."""
    if not examples.elements:
        return examples
    batch = tf.nest.map_structure(np.asarray, examples.first(count))
    fetch, there = fetcher(*batch), len(tf.nest.flatten(batch)[0])
    by_index = lambda indices: fetch(indices % there)  # noqa: E731
    return dataclasses.replace(examples, elements=None, open=lambda: by_index)


def _compared(make: Callable[..., Trial], several: Config, one: Config, jit_compile: str, is_by_tower: bool) -> Outcome:
    """Compares towers with one; says before how long it will take.

    Args:
      make: (options, changes of them) -> a training.
      jit_compile: of the run.
      is_by_tower: whether the run's batches are normalised by tower.
    """
    began, batches = time.perf_counter(), several.batches_per_step
    alone = make(one)
    numbers = sum(v.shape.num_elements() or 0 for v in (*alone.built.saved.variables, *alone.weights.values()))
    # As it was seen: steps take some four times a tower.
    secs = (time.perf_counter() - began) * (batches + 4) + comparison.SECS_OF_NUMBER * numbers
    comparison.announce(batches, secs, "--check_towers=never")
    many = make(several)
    dtype = operations.least_exact(alone.built.compared.losses[:1], [v.handle.op for v in alone.weights.values()]).dtype
    turns, what = one.accumulate_steps, f"{STEPS} steps of {several.global_batch} examples, {dtype.name}"
    if many.built.compared.normalizes and not is_by_tower:
        what += f", batch normalisation over all towers{' turn by turn' if turns > 1 else ''}"
    if jit_compile == "always":
        what += ", compiled" if several.jit_compile == "always" else ", not compiled as the run is"

    exact = np.dtype(dtype.as_numpy_dtype)

    def where(excess: Sequence[Gap], begun: Arrays | None) -> str:
        return _where(alone, alone if begun else many, excess, comparison.epsilon(exact) ** 0.6, begun)

    return comparison.Comparison(
        alone.train,
        many.train,
        alone.weights,
        exact,
        batches // turns,
        what,
        where,
        by_tower=(lambda begin: make(several, batch_norm="tower").train(begin)) if is_by_tower else None,
        resumes=True,
        alone=f"1, each with {turns} batches in turn," if turns > 1 else "1",
    ).outcome()


def _where(one: Trial, many: Trial, excess: Sequence[Gap], tolerance: float, begun: Arrays | None) -> str:
    """Names the first operation that differs. begun: what `many`, a resumed training, began with; None for towers."""
    name, step = excess[0].name.removeprefix(GRADIENT), excess[0].step
    if not step:
        return (
            f"The variable {name} begins at another value each time that the network is built, in each worker too. Let "
            "an initializer draw it, not Python."
        )
    culprit = None if begun else next(filter(None, (operations.assigning(one, gap.name) for gap in excess)), None)
    if not culprit or any(gap.name == LOSS for gap in excess):
        steps = step - 1 if begun else step
        culprit = operations.first_difference(one, many, steps, tolerance, begun) or culprit
    if culprit:
        return f"It begins at {culprit}."
    if begun:
        return "Something of the network is kept outside of its variables."
    line = next((f" ({source_line(v.op)})" for v in one.built.saved.variables if v.op.name == name), "")
    return (
        f"No operation of the network differs: it is in what is done after it, to {excess[0].name}{line}, such as a "
        "custom gradient, an update of more than its means, or an assignment outside of inference and loss."
    )
