"""The training graph: the parts of one step, in the order in which they happen."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph import (
    random_state,
    summaries,
    towers,
    transfer,
    update,
)
from tower_train.graph.collectives import AllReduce
from tower_train.graph.context import Context, ParamGroup
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import Draws, check_same
from tower_train.graph.gradients import is_finite, update_if_finite
from tower_train.graph.layout import Layout, lay_out
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.optimizers import make_optimizer
from tower_train.graph.progress import count_progress
from tower_train.graph.record import RandomNumbers, Request, SavedVariables, StepReport, TrainingGraph
from tower_train.graph.replica import Replica, average, by_tower, fingerprints, make_replicas
from tower_train.graph.schedule import Schedule, group_rate, scaling
from tower_train.graph.stream import Stream, training_stream
from tower_train.graph.towers import tower_loss
from tower_train.graph.update import Counters
from tower_train.options import rules
from tower_train.workload import Examples, Tensors, Workload, softmax_cross_entropy

v1 = tf.compat.v1


def training_graph(workload: Workload, examples: Examples, config: Config, devices: Devices) -> TrainingGraph:
    """Builds one step: a batch becomes the towers' losses, their gradients one mean, the mean one update.

    Raises:
      GraphError: the workload's network breaks a rule of the towers.
      ConfigError: an option that is useless for this network.
    """
    workload, layout = _with_smooth_labels(workload.for_examples(examples), config), _layout(config, devices)
    with tf.Graph().as_default() as graph, tf.device(HOST):
        v1.set_random_seed(config.seed & 0x7FFFFFFF)
        counters = Counters(layout.global_batch)  # steps and examples seen: the run's place in the stream
        stream = _input(workload, examples, config, layout, counters.examples_seen)
        rate = _learning_rate(config, examples.num_examples, counters.examples_seen)
        scale = LossScale(tf.as_dtype(config.dtype))  # none but for float16
        replicas = make_replicas(layout.replicas)  # one on the host, or one on each tower's device
        context = _context(config, layout, counters.epochs_seen(examples.num_examples))

        for tower, batch, first in zip(layout.towers, stream.batches, stream.firsts, strict=True):
            replica = replicas[tower.replica]
            if tower.waits:  # so that the activations of one batch at a time are in a device's memory
                batch, first = replica.after_last_tower((batch, first))
            draws = Draws(config.seed, first, layout.tower_batch, counters.examples_seen)
            with replica.tower(tower, towers.seeded(config.seed)), context.of_tower(tower.index, draws) as noted:
                outputs, loss_of_tower = tower_loss(workload, *batch, tf.as_dtype(config.dtype), training=True)
                draws.close()  # the backward pass may not draw
                replica.add(noted, loss_of_tower, scale.gradients(replica.compute_gradients, loss_of_tower))
        _check_towers(workload, examples, config, outputs, noted)

        all_reduce, requests = _all_reduce(config, layout), _requests(layout, stream, loss_of_tower.dtype)
        asked = average(replicas, all_reduce, requests)  # over all towers of all workers
        for replica in replicas:  # each has the same means, and so does the same update
            replica.finish_gradients(config.clip_gradients, config.optimizer)
        loss = stream.renewed(replicas[0].loss + replicas[0].weight_decay)  # there once the next batches are staged
        updates = [_prepare_update(config, replica, counters, context, rate) for replica in replicas]
        with tf.control_dependencies(all_reduce.operations):  # all of them, or other devices would wait for ever
            finite = update_if_finite(
                *by_tower(replicas), replicas[0].mean_grads, loss,
                apply=lambda: counters.count(scale.after_update(), after=[build() for build in updates]),
                skip=lambda: scale.without_update(loss, counters.count, skips=config.on_nonfinite == "skip"),
            )  # fmt: skip
        train_op = finite.op  # the conditional: it has updated the variables, or skipped
        counting, progress = _progress(config, stream, replicas)
        return TrainingGraph(
            graph=graph, layout=layout, examples=examples, stream=stream, train_op=train_op, requests=requests,
            report=_report(counters, replicas[0], rate, asked, finite, scale, counting), progress=progress,
            checked=("the loss", *(f"the gradient of {v.op.name}" for _, v in replicas[0].mean_grads)),
            summary=_summary(config, replicas[0], stream, train_op),
            saved=_saved(config, layout, replicas, all_reduce),
            random_numbers=_random_numbers(workload, stream, replicas, config.allow_stateful_random),
        )  # fmt: skip


def _layout(config: Config, devices: Devices) -> Layout:
    """Lays the step out; ConfigError for options of several copies of the variables if there is one."""
    mirrored = config.variable_update == "mirrored"
    layout = lay_out(devices, config.tower_batch, config.accumulate_steps, config.most_workers, mirrored)
    if layout.num_replicas == 1:
        for name, is_set in (("check_mirrors_every_steps", config.check_mirrors_every_steps),
                             ("all_reduce_dtype", config.all_reduce_dtype != "same")):  # fmt: skip
            if is_set:
                raise errors.ConfigError(
                    f"--{name}={getattr(config, name)}: there is one copy of the variables. It is for several workers, "
                    "or for --variable_update=mirrored with several towers."
                )
    return layout


def _with_smooth_labels(workload: Workload, config: Config) -> Workload:
    label_smoothing = config.label_smoothing
    if not label_smoothing:
        return workload
    if workload.loss is not softmax_cross_entropy:
        raise errors.ConfigError(
            f"--label_smoothing={label_smoothing:g}: workload {workload.name} has a loss of its own: smooth there."
        )
    return dataclasses.replace(workload, loss=functools.partial(softmax_cross_entropy, label_smoothing=label_smoothing))


def _input(
    workload: Workload, examples: Examples, config: Config, layout: Layout, examples_seen: tf.Variable
) -> Stream:
    """Makes the stream: a batch for every tower, from the position that the run has come to."""
    end = config.last_step(examples.num_examples) * layout.global_batch
    way = transfer.choose(config.augment_on, workload, examples, [tower.device for tower in layout.towers], end)
    with v1.name_scope("input"):
        return training_stream(workload, examples, config.seed, examples_seen, layout, way)


def learning_schedule(config: Config, num_examples: int) -> Schedule:
    """Returns the learning rate by the options, for so many examples per epoch."""
    return Schedule(
        kind=config.lr_schedule,
        initial=config.learning_rate,
        factor=config.learning_rate_decay_factor,
        epochs_per_decay=config.num_epochs_per_decay,
        boundaries=config.lr_boundaries,
        points=rules.parse_points(config.lr_points) if config.lr_points else None,
        scale=scaling(config.lr_scaling, config.global_batch, config.lr_base_batch),
        warmup_epochs=config.warmup_epochs,
        num_examples=num_examples,
        total_examples=config.last_step(num_examples) * config.global_batch,
    )


def _learning_rate(config: Config, num_examples: int, examples_seen: tf.Variable) -> tf.Tensor:
    with v1.name_scope("learning_rate"):
        return learning_schedule(config, num_examples).rate(examples_seen)


def _context(config: Config, layout: Layout, epochs_seen: tf.Tensor) -> Context:
    """Returns the context from which each tower's is made; its index is that of this worker's first tower."""
    return Context(
        tower=layout.first_tower,
        synchronized_towers=len(layout.devices) * layout.num_workers if config.sync_batch_norm else 0,
        epochs_seen=epochs_seen,
    )


def _check_towers(workload: Workload, examples: Examples, config: Config, outputs: Tensors, tower: Context) -> None:
    """Raises GraphError for too few outputs, ConfigError for --sync_batch_norm without a layer that it is for."""
    towers.check_classes(workload, examples, outputs, workload.loss)
    if config.sync_batch_norm and not any(statistic.followed for statistic in tower.statistics):
        raise errors.ConfigError(
            f"--sync_batch_norm: workload {workload.name} has no tower_train.layers.batch_normalization "
            "that is trained. Leave the option out."
        )


def _all_reduce(config: Config, layout: Layout) -> AllReduce:
    dtype = tf.bfloat16 if config.all_reduce_dtype == "bfloat16" else None
    kind = config.all_reduce or "collective"
    return AllReduce(layout.replicas, kind, dtype, layout.num_workers, weight=layout.weight)


def _requests(layout: Layout, stream: Stream, dtype: tf.DType) -> dict[str, Request]:
    """Returns what this worker may ask all workers for, by name; nothing without other workers."""
    if layout.num_workers == 1:
        return {}
    requests = {}
    for name in ("stopping", "saving") if stream.state else ("stopping",):
        asked = v1.get_variable(name, [], dtype, v1.zeros_initializer(), trainable=False,
                                collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
        requests[name] = Request(asked.read_value(), asked.assign(1, read_value=False), asked.initializer)
    return requests


def _prepare_update(
    config: Config, replica: Replica, counters: Counters, context: Context, rate: tf.Tensor
) -> Callable[[], tf.Operation]:
    """Returns a function that builds a replica's update; its optimizers exist already."""
    dtype = towers.variable_dtype(tf.as_dtype(config.dtype))

    def optimizer(group: ParamGroup) -> v1.train.Optimizer:
        learning_rate = tf.cast(group_rate(rate, context.epochs_seen, group), dtype)
        iterations = config.muon_iterations if group.muon else 0
        momentum = config.momentum if group.momentum is None else group.momentum
        return make_optimizer(config.optimizer, learning_rate, momentum, config.nesterov, iterations)

    def group_of(variable: tf.Variable) -> ParamGroup:
        return context.param_groups.get(replica.original(variable).op.name, ParamGroup())

    with replica.state_variables():
        groups = [
            (optimizer(rates), grads) for rates, grads in update.by_param_group(replica.mean_grads, group_of).items()
        ]
        build = update.prepare_update(
            groups, replica.trained(), replica.moving, config.moving_average_decay, counters.global_step
        )

    def build_there() -> tf.Operation:
        with tf.device(replica.device):
            return build()

    return build_there


def _progress(config: Config, stream: Stream, replicas: Sequence[Replica]) -> tuple[list, dict[str, tf.Tensor]]:
    """Returns ops that count what a step is done with, and the counts; none without a watchdog."""
    if not config.stall_timeout_secs:
        return [], {}
    tower_grads, tower_losses = by_tower(replicas)
    return count_progress(stream.arrivals, tower_losses, tower_grads)


def _report(
    counters: Counters, replica: Replica, rate: tf.Tensor, asked: dict[str, tf.Tensor], finite: tf.Tensor,
    scale: LossScale, counting: list[tf.Operation],
) -> StepReport:  # fmt: skip
    """Makes the small values of a step that running looks at."""
    loss = replica.loss + replica.weight_decay
    with tf.control_dependencies([finite, *counting]), v1.name_scope("report"):
        return StepReport(
            step=counters.global_step.read_value(),
            examples=counters.examples_seen.read_value(),
            loss=loss,
            cross_entropy=replica.loss,
            learning_rate=rate,
            stopping=asked.get("stopping", tf.zeros([], loss.dtype)),
            finite=finite,
            loss_scale=scale.report(loss, finite),
            saving=asked.get("saving", ()),
        )


def _summary(config: Config, replica: Replica, stream: Stream, update_op: tf.Operation) -> tf.Tensor | None:
    if not config.summary_every_steps:
        return None
    return summaries.step_summary(replica.mean_grads, stream.batches[0][0], update_op)


def _random_numbers(
    workload: Workload, stream: Stream, replicas: Sequence[Replica], allow_stateful: bool
) -> RandomNumbers:
    """Names the random numbers in the towers; random_state.check and draws.check_same refuse some."""
    first, loss = replicas[0].contexts[0], replicas[0].tower_losses[0]
    last = [loss.op, *(statistic.value.op for statistic in first.statistics)]
    if not stream.state:  # examples in an order of their own draw as they like: their iterator's state is saved
        last.append(stream.initializer)
    stateful = random_state.check(workload.name, last, allow_stateful)
    by_example = check_same([context.draws for replica in replicas for context in replica.contexts])
    return RandomNumbers(by_example, tuple(sorted(first.drawn_by_tower)), tuple(stateful))


def _saved(config: Config, layout: Layout, replicas: Sequence[Replica], all_reduce: AllReduce) -> SavedVariables:
    """Returns what a checkpoint holds, and the operations that look at it or spread it."""
    saved = v1.global_variables()
    with v1.name_scope("checks"):
        finite = {v.op.name: is_finite(v) for v in saved if v.dtype.is_floating}
    in_common = [v for v in saved if v.dtype.base_dtype != tf.string]  # texts are the positions of workers' iterators
    return SavedVariables(
        variables=saved,
        finite=finite,
        copied=tuple(variable.op.name for variable in replicas[0].copied()) if layout.num_replicas > 1 else (),
        fingerprints=fingerprints(replicas, all_reduce) if config.check_mirrors_every_steps else None,
        broadcast=all_reduce.broadcast(in_common, layout.worker) if layout.num_workers > 1 else None,
    )
