"""The outputs of a step besides its update: what the run logs, saves, compares and watches."""

from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors, normalization
from tower_train.examples import Tensors
from tower_train.graph import random_state
from tower_train.graph.collectives import AllReduce
from tower_train.graph.gradients import is_finite
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.record import Compared, SavedVariables, StepReport
from tower_train.graph.replica import BuiltTower, Mean, Replica, fingerprints
from tower_train.graph.step_plan import StepPlan
from tower_train.graph.stream import Stream
from tower_train.graph.towers import activation_notes, check_classes
from tower_train.graph.update import Counters

v1 = tf.compat.v1
INPUT = "input"  # a name in `progress`


def check_towers(plan: StepPlan, logits: Tensors, tower: BuiltTower) -> None:
    """Raises GraphError for too few outputs, ConfigError for options that exclude normalisation over all towers."""
    check_classes(plan.workload, plan.examples, logits, plan.workload.loss)
    config, normalized = plan.config, tower.context.normalized
    if config.batch_norm == "tower" or not normalized:
        return
    normalizes = f"workload {plan.workload.name} normalises batches ({normalized[0]})"
    instead = "Leave the option out, or normalise by tower (--batch_norm=tower)."
    if plan.examples.elements and plan.layout.num_workers > 1 and config.accumulate_steps > 1:
        raise errors.ConfigError(
            f"--accumulate_steps={config.accumulate_steps}: {normalizes} over all workers turn by turn, and its data "
            f"set in an order of its own comes to them worker by worker. {instead}"
        )
    if config.elastic:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: {normalizes}, which takes all towers at a time, and their number changes. "
            f"{instead}"
        )


def progress(
    plan: StepPlan, stream: Stream, towers: Sequence[BuiltTower]
) -> tuple[list[tf.Operation], dict[str, tf.Tensor]]:
    """Counts the steps of a session in which the input has come, and in which each tower is done; another thread can
    read that while a step is stuck.

    Returns:
      Ops to run with each step, and {INPUT or a tower's name: int64 scalar, steps}; none without a watchdog.
    """
    if not plan.config.stall_timeout_secs:
        return [], {}
    ops, counts, local = [], {}, [v1.GraphKeys.LOCAL_VARIABLES]
    by_tower = {f"tower_{i}": [tower.loss, *tower.last] for i, tower in enumerate(towers)}
    for name, arrived in {INPUT: stream.arrivals, **by_tower}.items():
        zeros = v1.zeros_initializer()
        counter = v1.get_variable(f"progress/{name}", [], tf.int64, zeros, trainable=False, collections=local)
        with tf.control_dependencies([tf.group(*arrived)]):  # one message from each device
            ops.append(counter.assign_add(1).op)
        counts[name] = counter.read_value()
    return ops, counts


def step_report(
    counters: Counters,
    rate: tf.Tensor,
    mean: Mean,
    scale: LossScale,
    finite: tf.Tensor,
    stream: Stream,
    counting: Sequence[tf.Operation],
) -> StepReport:
    """Makes the small values of a step that running looks at, after the update and the ops of `progress`."""
    with tf.control_dependencies([finite, *counting]), v1.name_scope("report"):
        report = StepReport(
            step=counters.global_step.read_value(),
            examples=counters.examples_seen.read_value(),
            loss=mean.loss,
            data_loss=mean.data_loss,
            learning_rate=rate,
            # one form of report, whatever the number of workers
            stopping=tf.zeros([], mean.loss.dtype) if mean.stopping is None else mean.stopping,
            finite=finite,
            **scale.report(mean.loss, finite),
        )
    return report._replace(input_secs=stream.waited(mean.gradients[0][0]))


def saved_variables(plan: StepPlan, replicas: Sequence[Replica], all_reduce: AllReduce) -> SavedVariables:
    """Returns the contents of a checkpoint, and the operations that check or broadcast them."""
    saved, copied, layout = v1.global_variables(), replicas[0].variables.copied(), plan.layout
    with v1.name_scope("checks"):
        # asked before each save: a checkpoint with NaN would push good ones out of the rotation
        finite = {v.op.name: is_finite(v) for v in saved if v.dtype.is_floating}
    # strings are the positions of workers' iterators, which differ
    in_common = [v for v in saved if v.dtype.base_dtype != tf.string]
    return SavedVariables(
        variables=saved,
        finite=finite,
        copied=tuple(variable.op.name for variable in copied) if layout.num_replicas > 1 else (),
        fingerprints=fingerprints(replicas, all_reduce) if plan.config.check_mirrors_every_steps else None,
        broadcast=all_reduce.broadcast(in_common, layout.worker) if layout.num_workers > 1 else None,
    )


def stateful(plan: StepPlan, stream: Stream, tower: BuiltTower) -> tuple[str, ...]:
    """Names the operations of a tower with a random state, which make N towers differ from one; GraphError unless they
    are allowed."""
    # an operation on which neither of these depends cannot make towers differ
    last = [tower.loss.op, *(statistic.value.op for statistic in tower.context.statistics)]
    if not stream.state:  # a data set in its own order may draw as it likes, as its iterator's state is saved
        last.append(stream.initializer)
    found = tuple(random_state.find(last))
    if found and not plan.config.allow_stateful_random:
        random_state.refuse_stateful(plan.workload.name, found)
    return found


def compared(mean: Mean, towers: Sequence[BuiltTower]) -> Compared:
    """Returns the values of a step by which its towers are compared with one."""
    first = towers[0].context
    return Compared(
        losses=[tower.loss for tower in towers],
        gradients={variable.op.name: gradient for gradient, variable in mean.gradients},
        assigned={each.moving.op.name: each.value for each in first.statistics if not each.momentum},
        normalizes=bool(first.normalized),
    )


def notes(plan: StepPlan, stream: Stream, logits: Tensors, tower: BuiltTower) -> tuple[str, ...]:
    """Returns lines for the log."""
    return (
        *stream.notes,
        *normalization.notes(tower.context),
        *activation_notes(plan.workload, logits),
    )
