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
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from tower_train import errors, host
from tower_train.config import Config
from tower_train.examples import Examples
from tower_train.graph.random_state import source_line
from tower_train.graph.record import TrainingGraph
from tower_train.proof import operations
from tower_train.proof.comparison import GRADIENT, LOSS, Values, Verdict, beyond, compare, earliest, gaps
from tower_train.proof.first import EACH, announce
from tower_train.proof.rounding import epsilon, least_exact
from tower_train.proof.trial import Trial
from tower_train.workload import Workload

_MOST_DEVICES, _MOST_BATCHES = 4, 2  # of --check_towers=auto; more towers would show nothing else
_LARGE = 1_500  # operations of a tower; building more takes many seconds
_HEAVY = 100_000_000  # multiplications for an example; steps of more take many seconds in float64
_MOST_COMPILED = 600  # operations of a tower; XLA takes many seconds to compile more for a CPU
_ROOT = pathlib.Path(__file__).parents[2]
_OURS = (_ROOT / "cifar10", _ROOT / "tower_train")  # whose workloads the tests compare


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of the comparison."""

    verdict: Verdict
    towers: int
    steps: int
    examples: int  # of a step
    dtype: str  # of the arithmetic on the way from the weights to the loss
    normalizes: bool  # whether batches are normalised, for this over all towers
    turns: int  # batches of a tower, one after the other, which are normalised each by itself; else 1
    differs: str  # what differs, and where that begins; empty if nothing does
    seconds: float = 0.0
    compiled: bool | None = None  # of towers that the run compiles by XLA, whether the compared were; None of others
    not_float64: str = ""  # the error that float64 meets; empty if there is none

    @property
    def line(self) -> str:
        """A line for the log."""
        why = f". In float64: {self.not_float64}" if self.not_float64 else ""
        if self.differs:
            return f"*** --allow_differences: {self.differs.removesuffix('.') + why if why else self.differs}"
        about = f"{self.steps} steps of {self.examples} examples, {self.dtype}"
        if self.normalizes and not self.verdict.by_tower:
            about += f", batch normalisation over all towers{' turn by turn' if self.turns > 1 else ''}"
        about += {None: "", True: ", compiled", False: ", not compiled as the run is"}[self.compiled]
        one = f"1, each with {self.turns} batches in turn," if self.turns > 1 else "1"
        return self.verdict.line(self.towers // self.turns, f"{about}; {self.seconds:.1f} s", one) + why

    @property
    def relative(self) -> float:
        """The largest difference, or the first that is more than rounding."""
        return self.verdict.excess[0].relative if self.verdict.excess else self.verdict.gap.proportion

    @property
    def record(self) -> dict:
        """The entry in run.json."""
        gap, by_tower = (*self.verdict.excess, self.verdict.gap)[0], self.verdict.by_tower
        about = vars(self) | {"differs": self.differs or None, "undecided": self.verdict.undecided} | {
            "line": self.line,
            "by_tower": {"of": by_tower.name, "relative": by_tower.proportion} if by_tower else None,
            "largest_difference": {
                "of": gap.name, "step": gap.step, "relative": self.relative if math.isfinite(self.relative) else None
            },
        }  # fmt: skip
        del about["verdict"]
        return about


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
    is_large, most = _is_large(graph), min(EACH, graph.layout.tower_batch)
    # Batch statistics of two examples magnify roundings beyond measure.
    least = min(2 if workload.mix else 1, most) if is_large and not graph.compared.normalizes else most
    # Some programs cannot take one example, as one with tf.squeeze.
    sizes, steps = dict.fromkeys([least, most]), 2 if is_large else 3
    several, one = _configs(config, graph, most)
    if one.batches_per_step == several.batches_per_step:
        return (
            f"*** towers: nothing to compare: there is one, whose {config.accumulate_steps} batches of a step are "
            "normalised each by itself, which one batch of all is not"
        )
    examples = _at_hand(examples, steps * several.global_batch)
    refusals: list[Exception] = _beyond_memory(graph)
    dtypes = dict.fromkeys(["float64", "float32", config.dtype][len(refusals) :])
    for each, dtype in itertools.product(sizes, dtypes):
        several, one = _configs(dataclasses.replace(config, dtype=dtype), graph, each)
        by_tower = config.batch_norm == "tower" and graph.compared.normalizes
        try:
            outcome = _compared(functools.partial(Trial, workload, examples), several, one, steps, by_tower, began)
            break
        except Exception as error:  # whatever the network raises for small batches, or TensorFlow in another dtype
            refusals.append(error)
    else:
        first = refusals[0]  # the others are of dtypes that the network may not be made for
        if isinstance(first, errors.GraphError):
            raise first
        return f"*** towers: not compared with one, as a step of few examples fails ({errors.reason(first)})."
    outcome = dataclasses.replace(
        outcome, seconds=time.perf_counter() - began, not_float64=errors.reason(refusals[0]) if refusals else "",
        compiled=several.jit_compile == "always" if config.jit_compile == "always" else None,
    )  # fmt: skip
    if outcome.differs and not config.allow_differences:
        why = f" In float64: {outcome.not_float64}." if outcome.not_float64 else ""
        raise errors.GraphError(
            f"workload {workload.name}: {outcome.differs}{why}\n"
            "Change that, or train all the same with --allow_differences."
        )
    return outcome


def _tower_ops(graph: TrainingGraph) -> list[tf.Operation]:
    return [op for op in graph.graph.get_operations() if op.name.startswith("tower_0/")]


def _is_large(graph: TrainingGraph) -> bool:
    """Returns whether a tower takes long to build, or its steps in float64."""
    ops = _tower_ops(graph)
    products = sum(_products(op) for op in ops if not op.name.startswith("tower_0/gradients/"))
    return len(ops) > _LARGE or products > _HEAVY * graph.layout.tower_batch


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
        jit_compile=config.jit_compile if len(_tower_ops(graph)) <= _MOST_COMPILED else "never",
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

    return dataclasses.replace(examples, elements=None, open_for_worker=None, open=lambda: fetch)


def _compared(
    make: Callable[[Config], Trial], several: Config, one: Config, steps: int, by_tower: bool, began: float
) -> Outcome:
    """Does the steps with one tower and with several, and compares them; says before how long it will take.

    Args:
      make: builds a training.
      by_tower: whether the run's batches are normalised by tower.
    """
    alone, batches = make(one), several.batches_per_step
    # As it was seen: steps take some four times a tower.
    announce(batches, (time.perf_counter() - began) * (batches + 4), "--check_towers=never")
    many = make(several)
    dtype = least_exact(alone.built.compared.losses[:1], [v.handle.op for v in alone.weights.values()]).dtype
    rounding = epsilon(np.dtype(dtype.as_numpy_dtype))

    def normalized_by_tower(_) -> Iterable[Values]:
        return make(dataclasses.replace(several, batch_norm="tower")).train(steps)

    def verdict_against(alone: Trial) -> Verdict:
        trainings = alone.training(steps, rounding), many.training(steps, rounding)
        return compare(*trainings, alone.weights, rounding, normalized_by_tower if by_tower else None)

    verdict = verdict_against(alone)
    if verdict.excess and several.jit_compile == "always":  # XLA's arithmetic may differ from TensorFlow's
        alone = make(dataclasses.replace(one, jit_compile="always"))
        verdict = verdict_against(alone)
    resumed_gaps, why = [], ""
    if not verdict.undecided:
        whole = alone.train(steps)
        begun = next(whole).variables  # a resumed training goes on from there
        resumed_gaps = beyond(gaps(whole, alone.train(steps - 1, begun), alone.weights, first=2), rounding)
        verdict = dataclasses.replace(verdict, excess=earliest(resumed_gaps) or verdict.excess)
    if verdict.excess and (name := alone.begins_unlike(many)):
        why = (
            f"the variable {name} begins at another value each time that the network is built, in each worker too. Let "
            "an initializer draw it, not Python."
        )
    elif resumed_gaps:
        culprit = operations.first_difference(alone, alone, verdict.excess[0].step - 1, rounding**0.6, begun)
        why = f"a resumed training differs from a whole one: {verdict.differs}.\n" + (
            f"It begins at {culprit}." if culprit else "Something of the network is kept outside of its variables."
        )
    elif verdict.excess:
        why = _towers_differ(alone, many, verdict, rounding)
    size, normalizes = many.built.layout.global_batch, many.built.compared.normalizes
    return Outcome(verdict, many.towers, steps, size, dtype.name, normalizes, one.accumulate_steps, why)


def _towers_differ(one: Trial, many: Trial, verdict: Verdict, rounding: float) -> str:
    """Says what differs by how much, and names the first operation that does."""
    excess = verdict.excess
    culprit = next(filter(None, (operations.assigning(one, gap.name) for gap in excess)), None)
    if not culprit or any(gap.name == LOSS for gap in excess):
        culprit = operations.first_difference(one, many, excess[0].step, rounding**0.6) or culprit
    where = f"It begins at {culprit}."
    if not culprit:
        changed = excess[0].name.removeprefix(GRADIENT)
        line = next((f" ({source_line(v.op)})" for v in one.built.saved.variables if v.op.name == changed), "")
        where = (
            f"No operation of the network differs: it is in what is done after it, to {excess[0].name}{line}, such as "
            "a custom gradient, an update of more than its means, or an assignment outside of inference and loss."
        )
    return f"{many.towers} towers differ from 1 on this network: {verdict.differs}.\n{where}"
