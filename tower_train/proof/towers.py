"""Shows on a run's own network that its towers are one: a few small steps with one tower and with several.

The steps are on the first examples of the run, on the host, in float64 if the network follows --dtype. With
--batch_norm=tower towers differ by design: then two comparisons tell by how much, and that nothing else does.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.config import Config
from tower_train.console import ProgressBar, say
from tower_train.examples import Examples
from tower_train.graph.random_state import line_of
from tower_train.graph.record import TrainingGraph
from tower_train.proof import operations
from tower_train.proof.comparison import EACH, GRADIENT, LOSS, Gap, beyond, compare, earliest, gaps
from tower_train.proof.rounding import epsilon, least_exact
from tower_train.proof.trial import Trial
from tower_train.workload import Workload

_MOST_DEVICES, _MOST_BATCHES = 4, 2  # of --check_towers=auto; more towers would show nothing else
_LARGE = 1_500  # operations of a tower; building more takes many seconds
_HEAVY = 100_000_000  # multiplications for an example; steps of more take many seconds in float64
_MOST_COMPILED = 600  # operations of a tower; XLA takes many seconds to compile more for a CPU
_LONG_SECS = 10  # the log announces a longer comparison
_ROOT = pathlib.Path(__file__).parents[2]
_OURS = (_ROOT / "cifar10", _ROOT / "tower_train")  # whose workloads the tests compare


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of the comparison.

    Attributes:
      towers, steps, examples: how many were compared; examples are those of a step.
      dtype: of the arithmetic on the way from the weights to the loss.
      gap: the largest relative difference, or the first that is more than rounding.
      normalizes: whether batches are normalised, for this over all towers.
      turns: batches of a tower, one after the other, which are normalised each by itself; else 1.
      seconds: that it took.
      by_tower: the largest difference with --batch_norm=tower, if that is how the run trains.
      compiled: of towers that the run compiles by XLA, whether those were that were compared; None of others.
      differs: what differs, and where that begins; empty if nothing does.
      undecided: why nothing can be told; empty if something can.
      not_float64: the error that float64 meets; empty if there is none.
    """

    towers: int
    steps: int
    examples: int
    dtype: str
    gap: Gap
    normalizes: bool
    turns: int
    seconds: float
    by_tower: Gap | None = None
    compiled: bool | None = None
    differs: str = ""
    undecided: str = ""
    not_float64: str = ""

    @property
    def line(self) -> str:
        """A line for the log."""
        why = f". In float64: {self.not_float64}" if self.not_float64 else ""
        if self.differs:
            return f"*** --allow_differences: {self.differs.removesuffix('.') + why if why else self.differs}"
        if self.undecided:
            return f"*** towers: {self.undecided}{why}"
        about = f"{self.steps} steps of {self.examples} examples, {self.dtype}"
        if self.normalizes and not self.by_tower:
            about += f", batch normalisation over all towers{' turn by turn' if self.turns > 1 else ''}"
        about += {None: "", True: ", compiled", False: ", not compiled as the run is"}[self.compiled]
        about, count = f"({about}; {self.seconds:.1f} s){why}", self.towers // self.turns
        if self.by_tower:
            return (
                f"*** towers: {count} are not 1 with --batch_norm=tower: {self.by_tower.name} differs by "
                f"{self.by_tower.of_largest:.0e} on this network, and by {self.relative:.0e} with "
                f"--batch_norm=global {about}"
            )
        one = f"1, each with {self.turns} batches in turn," if self.turns > 1 else "1"
        return f"towers:   {count} equal {one} on this network to {self.relative:.0e} {about}"

    @property
    def relative(self) -> float:
        return self.gap.relative if self.differs else self.gap.of_largest

    @property
    def record(self) -> dict:
        """The entry in run.json."""
        about = dataclasses.asdict(self) | {"differs": self.differs or None}
        gap, relative = about.pop("gap"), self.relative if math.isfinite(self.relative) else None
        if self.by_tower:
            about["by_tower"] = {"of": self.by_tower.name, "relative": self.by_tower.of_largest}
        return about | {"largest_difference": {"of": gap["name"], "step": gap["step"], "relative": relative}}


def is_due(config: Config, import_path: str | None, stateful: Sequence[str] = ()) -> bool:
    """Returns whether a new run is compared with one tower.

    Args:
      config: of the run.
      import_path: of its workload; None if it has none.
      stateful: operations that draw from a state of their own, which are allowed; the log tells that towers differ.
    """
    if stateful and config.check_towers.isdecimal():
        raise errors.ConfigError(
            f"--check_towers={config.check_towers}: operations with a random state of their own draw otherwise in "
            "towers. Leave out the option, or --allow_stateful_random."
        )
    if config.check_towers == "never" or stateful:
        return False
    if config.check_towers != "auto":
        return True
    file = getattr(sys.modules.get((import_path or "").partition(":")[0]), "__file__", None)  # names may be a user's
    is_ours = file is not None and any(pathlib.Path(file).is_relative_to(folder) for folder in _OURS)
    return config.batches_per_step > 1 and not is_ours


def compare_towers(workload: Workload, examples: Examples, config: Config, graph: TrainingGraph) -> Outcome | str:
    """Compares a few steps of a run's towers with those of one tower.

    Args:
      workload, examples, config: of the run.
      graph: which the run will train by.

    Returns:
      The outcome, or a line if the network cannot be built small or on the host.

    Raises:
      GraphError: they differ, and config.allow_differences is not set; or the network breaks a rule of the towers.
    """
    began = time.perf_counter()
    ops = [op for op in graph.graph.get_operations() if op.name.startswith("tower_0/")]
    is_large = _is_large(ops, graph.layout.tower_batch)
    steps = 2 if is_large else 3
    normalizes = graph.compared.normalizes
    # Batch statistics of two examples magnify roundings beyond measure.
    each = min((2 if workload.mix else 1) if is_large and not normalizes else EACH, graph.layout.tower_batch)
    small = config if len(ops) <= _MOST_COMPILED else dataclasses.replace(config, jit_compile="never")
    sizes = [_configs(small, graph, size) for size in dict.fromkeys([each, min(EACH, graph.layout.tower_batch)])]
    several, one = sizes[0]
    if one.batches_per_step == several.batches_per_step:
        return (
            f"*** towers: nothing to compare: there is one, whose {config.accumulate_steps} batches of a step are "
            "normalised each by itself, which one batch of all is not"
        )
    examples = _at_hand(examples, steps * sizes[-1][0].global_batch)
    refusals: list[Exception] = _beyond_memory(graph)
    dtypes = dict.fromkeys(["float64", "float32", config.dtype][len(refusals) :])
    # Some programs cannot take one example, as one with tf.squeeze.
    for (several, one), dtype in itertools.product(sizes, dtypes):
        several, one = (dataclasses.replace(options, dtype=dtype) for options in (several, one))
        try:
            with ProgressBar(_columns, total=2 + 3 * steps) as bar:
                make = lambda options, bar=bar: Trial(workload, examples, options, bar)  # noqa: E731
                outcome = _tried(make, several, one, steps, normalizes, config.batch_norm, began)
            break
        except Exception as error:  # whatever the network raises for small batches, or TensorFlow in another dtype
            refusals.append(error)
    else:
        first = refusals[0]  # the others are of dtypes that the network may not be made for
        if isinstance(first, errors.GraphError):
            raise first
        return f"*** towers: not compared with one, as a step of few examples fails ({errors.reason(first)})."
    not_float64 = errors.reason(refusals[0]) if refusals else ""
    outcome = dataclasses.replace(
        outcome, seconds=time.perf_counter() - began, not_float64=not_float64,
        compiled=several.jit_compile == "always" if config.jit_compile == "always" else None,
    )  # fmt: skip
    if outcome.differs and not config.allow_differences:
        raise errors.GraphError(
            f"workload {workload.name}: {outcome.differs}{f' In float64: {not_float64}.' if not_float64 else ''}\n"
            "Change that, or train all the same with --allow_differences."
        )
    return outcome


def _is_large(ops: Sequence[tf.Operation], tower_batch: int) -> bool:
    """Returns whether a tower of these operations takes long to build, or its steps in float64."""
    products = sum(_products(op) for op in ops if not op.name.startswith("tower_0/gradients/"))
    return len(ops) > _LARGE or products > _HEAVY * tower_batch


def _products(op: tf.Operation) -> float:
    """Returns about how many multiplications an operation of a forward pass takes; 0 where shapes are unknown."""
    if op.type.endswith(("MatMul", "Conv2D", "Conv3D")):  # products with each row of the weights
        return (op.outputs[0].shape.num_elements() or 0) * (op.inputs[1].shape[:-1].num_elements() or 0)
    if op.type in ("Einsum", "BatchMatMulV2") and len(op.inputs) == 2:  # m n, n k and m k numbers
        return math.sqrt(math.prod(tensor.shape.num_elements() or 0 for tensor in (*op.inputs, op.outputs[0])))
    return 0


def _beyond_memory(graph: TrainingGraph) -> list[Exception]:
    """Returns why float64 cannot be: the variables of three trainings, and what is fetched of each, have no place."""
    numbers = sum(variable.shape.num_elements() or 0 for variable in graph.saved.variables)
    needed = 64 * numbers  # eight times, as seen, of 8 bytes
    if needed <= (host.free_memory() or needed):
        return []
    return [MemoryError(f"{numbers:,} numbers in variables would take {needed / 2**30:.0f} GiB of memory")]


def _columns(progress) -> list:
    return ["comparing towers with one", progress.BarColumn(), progress.TimeElapsedColumn()]


def _announce(several: Config, seconds: float, trials: Sequence[Trial]) -> None:
    """Tells of a long comparison, once one tower has been built in so many seconds."""
    remaining = seconds * (several.batches_per_step + 4)  # as it was seen: steps take some four times a tower
    if len(trials) == 1 and remaining > _LONG_SECS:
        count = several.batches_per_step
        say(f"towers:   comparing {count} with 1, for about {remaining:.0f} s (--check_towers=never leaves it out)")


def _configs(config: Config, graph: TrainingGraph, each: int) -> tuple[Config, Config]:
    """Returns the options of a small training with several towers of `each` examples, and those of one tower, which is
    not compiled.

    Towers take batches in turn as in the run. If these are normalised, each by itself, the one tower has as many.
    """
    layout = graph.layout
    devices, batches = len(layout.devices) * layout.num_workers, min(config.accumulate_steps, _MOST_BATCHES)
    if config.check_towers != "auto":
        devices, batches = int(config.check_towers), 1
    devices = min(devices, _MOST_DEVICES) if config.check_towers == "auto" else devices
    turns = batches if graph.compared.normalizes else 1
    mirrored = devices > 1 and (config.variable_update == "mirrored" or layout.num_workers > 1)
    several = dataclasses.replace(
        config, device="cpu", num_gpus=devices, gpus=None, batch_size=each, global_batch_size=None,
        accumulate_steps=batches, variable_update="mirrored" if mirrored else "cpu", all_reduce=None,
        check_mirrors_every_steps=0, augment_on="auto", worker_hosts=None, task_index=None,
        elastic=None, wait_for_workers=False, batch_norm="global", summary_every_steps=0,
        stall_timeout_secs=0, keep_hardest=None,
    )  # fmt: skip
    one = dataclasses.replace(
        several, num_gpus=1, accumulate_steps=turns, variable_update="cpu", jit_compile="never",
        batch_size=each * devices * batches // turns,
    )  # fmt: skip
    return several, one


def _at_hand(examples: Examples, count: int) -> Examples:
    """Returns examples by index; the first ones in place of a data set in an order of its own, which would be read
    anew in each session."""
    if not examples.elements:
        return examples
    values = tf.nest.map_structure(np.asarray, examples.first(count))
    length = len(tf.nest.flatten(values)[0])

    def fetch(indices: tf.Tensor):
        return tf.nest.map_structure(lambda value: tf.gather(tf.constant(value), indices % length), values)

    return dataclasses.replace(examples, elements=None, of_worker=None, open=lambda: fetch)


def _tried(
    make: Callable[[Config], Trial],
    several: Config,
    one: Config,
    steps: int,
    normalizes: bool,
    batch_norm: str,
    began: float,
) -> Outcome:
    """Does the steps with one tower and with several, and compares them; says before how long it will take."""
    trials = []
    for options in (one, several):
        trials.append(make(options))
        _announce(several, time.perf_counter() - began, trials)
    compiled = None
    if several.jit_compile == "always":
        compiled = functools.partial(make, dataclasses.replace(one, jit_compile="always"))
    outcome = _compared(*trials, steps, normalizes, one.accumulate_steps, compiled)
    if batch_norm == "tower" and normalizes and not outcome.differs:
        alone, by_tower = trials[0], make(dataclasses.replace(several, batch_norm="tower"))
        found = gaps(alone.train(steps), by_tower.train(steps), alone.weights)
        outcome = dataclasses.replace(outcome, by_tower=max(found, key=lambda gap: gap.of_largest))
    return outcome


def _compared(
    one: Trial, many: Trial, steps: int, normalizes: bool, turns: int, compiled: Callable[[], Trial] | None = None
) -> Outcome:
    """Compares trials; if they differ, rather with that of one compiled tower, which may differ from `one` likewise."""
    dtype = least_exact(one.built.compared.losses[:1], [v.handle.op for v in one.weights.values()]).dtype
    rounding, size = epsilon(np.dtype(dtype.as_numpy_dtype)), many.built.layout.global_batch
    verdict = compare(one.training(steps, rounding), many.training(steps, rounding), one.weights, rounding)
    if verdict.excess and compiled:
        return _compared(compiled(), many, steps, normalizes, turns)
    outcome = Outcome(many.towers, steps, size, dtype.name, verdict.gap, normalizes, turns, 0.0)
    if verdict.nothing:
        why = f"nothing to compare: {verdict.nothing} ({steps} steps of {size} examples)"
        return dataclasses.replace(outcome, undecided=why)
    whole = one.train(steps)
    begun = next(whole).variables  # a resumed training goes on from there
    of_resumed = earliest(beyond(gaps(whole, one.train(steps - 1, begun), one.weights, first=2), rounding))
    excess, why = of_resumed or verdict.excess, ""
    if excess and (name := one.begins_unlike(many)):
        why = (
            f"the variable {name} begins at another value each time that the network is built, in each worker too. Let "
            "an initializer draw it, not Python."
        )
    elif of_resumed:
        culprit = operations.first_difference(one, one, excess[0].step - 1, rounding**0.6, begun)
        why = f"a resumed training differs from a whole one: {_by_how_much(excess)}.\n" + (
            f"It begins at {culprit}." if culprit else "Something of the network is kept outside of its variables."
        )
    elif excess:
        why = _towers_differ(one, many, excess, rounding)
    if why:
        return dataclasses.replace(outcome, gap=excess[0], differs=why)
    if verdict.is_noise:
        why = (
            f"{many.towers} differ from 1 by {verdict.gap.of_largest:.0e}, as 1 does once its weights are rounded: "
            "this network magnifies roundings so much that nothing can be told"
        )
    return dataclasses.replace(outcome, undecided=why)


def _towers_differ(one: Trial, many: Trial, excess: Sequence[Gap], rounding: float) -> str:
    """Says what differs by how much, and names the first operation that does."""
    culprit = next(filter(None, (operations.assigning(one, gap.name) for gap in excess)), None)
    if not culprit or any(gap.name == LOSS for gap in excess):
        culprit = operations.first_difference(one, many, excess[0].step, rounding**0.6) or culprit
    where = f"It begins at {culprit}."
    if not culprit:
        changed = excess[0].name.removeprefix(GRADIENT)
        [line] = [f" ({line_of(v.op)})" for v in one.built.saved.variables if v.op.name == changed][:1] or [""]
        where = (
            f"No operation of the network differs: it is in what is done after it, to {excess[0].name}{line}, such as "
            "a custom gradient, an update of more than its means, or an assignment outside of inference and loss."
        )
    return f"{many.towers} towers differ from 1 on this network: {_by_how_much(excess)}.\n{where}"


def _by_how_much(excess: Sequence[Gap]) -> str:
    loss = [gap for gap in excess[1:] if gap.name == LOSS]
    shown = " and ".join(map(str, [excess[0], *loss]))
    return f"{shown} in step {excess[0].step}"
