"""The training graph: the parts of one step, in the order in which they happen."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors, normalization
from tower_train.config import Config
from tower_train.examples import Examples, Tensors
from tower_train.graph import class_weights, hard_examples, random_state, summaries, xla
from tower_train.graph.collectives import AllReduce
from tower_train.graph.context import Context, ParamGroup
from tower_train.graph.devices import HOST, Devices
from tower_train.graph.draws import Draws
from tower_train.graph.gradients import GradientsAndVariables, is_finite, update_if_finite
from tower_train.graph.layout import Layout, lay_out
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.optimizers import make_optimizer
from tower_train.graph.progress import INPUT, count_progress
from tower_train.graph.record import Choice, Compared, RandomNumbers, SavedVariables, StepReport, TrainingGraph
from tower_train.graph.replica import BuiltTower, Replica, average, fingerprints, make_replicas, towers_of
from tower_train.graph.schedule import group_rate, learning_rate
from tower_train.graph.stream import Stream, training_stream
from tower_train.graph.towers import activation_notes, check_classes, seeded, tower_loss
from tower_train.graph.transfer import choose_transfer
from tower_train.graph.update import Counters, prepare_update
from tower_train.workload import Workload, softmax_cross_entropy

v1 = tf.compat.v1


def training_graph(workload: Workload, examples: Examples, config: Config, devices: Devices) -> TrainingGraph:
    """Builds one step: a batch becomes the towers' losses, their gradients one mean, the mean one update.

    Raises GraphError if the network breaks a rule of the towers, ConfigError for an option that is useless for it.
    """
    workload, layout = _with_smooth_labels(workload.for_examples(examples), config), _layout(config, devices)
    with tf.Graph().as_default() as graph, tf.device(HOST):
        is_compiled = config.jit_compile == "always"
        if is_compiled:
            xla.leave_to_xla(devices.session_config)
        counters = Counters(layout.global_batch)  # steps and examples seen: the run's place in the stream
        hard = hard_examples.of(config.keep_hardest, workload, examples, config.seed, layout.global_batch)
        stream = _input(workload, examples, config, layout, counters.examples_seen, hard and hard.locate, is_compiled)
        rate = learning_rate(config, examples.num_examples, counters.examples_seen)
        of_classes = class_weights.read(config.class_weight, examples)
        scale = LossScale(tf.as_dtype(config.dtype))  # none but for float16
        replicas = make_replicas(layout.replicas, is_compiled)  # one on the host, or one on each tower's device
        context = _context(config, layout, counters.epochs_seen(examples.num_examples))

        for tower, batch, position in zip(layout.towers, stream.batches, stream.positions, strict=True):
            replica = replicas[tower.replica]
            if tower.turn:  # so that the activations of one batch at a time are in a device's memory
                batch, position = replica.after_last_tower((batch, position))
            draws = Draws(config.seed, position, layout.tower_batch, counters.examples_seen)
            entered = context.enter_tower(
                tower.index, draws, tower.turn, tf.nest.flatten(batch, expand_composites=True)
            )
            with (
                replica.variables.tower(tower, seeded(config.seed)),
                xla.compiled(is_compiled, tower.device),
                entered as noted,
                normalization.over_towers(),
            ):
                outputs, loss_of_tower = tower_loss(workload, *batch, tf.as_dtype(config.dtype), of_classes)
                if hard:
                    hard.add(outputs, batch[1])
                loss_of_tower = replica.whole_loss(loss_of_tower)
                draws.close()  # the backward pass may not draw
                replica.add(noted, loss_of_tower, scale.gradients(replica.variables.gradients, loss_of_tower))
        built = towers_of(replicas)
        _check_towers(workload, examples, config, outputs, built[0])

        all_reduce = AllReduce(layout.replicas, config.all_reduce or "collective", layout.num_workers, layout.weight)
        votes, ask_to_stop = _stop_request(layout, loss_of_tower.dtype)
        stopping = average(replicas, all_reduce, votes)  # over all towers of all workers, as gradients and losses are
        for replica in replicas:  # each has the same means, and so does the same update
            replica.finish_gradients(config.clip_gradients)
        with replicas[0].here():
            loss = replicas[0].loss + replicas[0].weight_decay
        updates = _updates(config, rate, context, counters, replicas)
        if hard:
            updates.append(hard.prepare_note(counters.examples_seen.read_value(), all_reduce.gather))
        # All of them, or other devices would wait for ever; and what layers assign, which may be read from the weights.
        before = [*all_reduce.operations, *(each.value.op for replica in replicas for each in replica.moving)]
        with tf.control_dependencies(before):
            finite = update_if_finite(  # finite.op, a conditional, is the step
                [(tower.loss, tower.gradients) for tower in built], replicas[0].mean_grads, loss,
                apply=lambda: counters.count(scale.after_update(), after=[build() for build in updates]),
                skip=lambda: scale.without_update(loss, counters.count, skips=config.on_nonfinite == "skip"),
                when=stream.renewed,  # once the next batches are staged
                here=replicas[0].here,
            )  # fmt: skip
        if is_compiled:
            xla.leave_out_other_devices(graph)
        counting, progress = _progress(config, stream, built)
        return TrainingGraph(
            graph, layout, examples, stream, train_op=finite.op, ask_to_stop=ask_to_stop, progress=progress,
            report=_report(counters, replicas[0], loss, rate, stopping, finite, scale, counting)._replace(
                input_secs=stream.waited(replicas[0].mean_grads[0][0])
            ),
            summary=summaries.step_summary(replicas[0].mean_grads, stream.batches[0][0], update=finite.op)
            if config.summary_every_steps else None,
            saved=_saved(config, layout, replicas, all_reduce),
            random_numbers=_random_numbers(workload, stream, built, config.allow_stateful_random),
            compared=_compared(built, replicas[0].mean_grads),
            choice=hard and Choice(hard.pass_at, hard.choose(counters.examples_seen.read_value())),
            notes=(
                *stream.notes, *normalization.notes(built[0].context), *class_weights.lines(of_classes, examples),
                *activation_notes(workload, outputs),
            ),
        )  # fmt: skip


def _layout(config: Config, devices: Devices) -> Layout:
    """Lays the step out; ConfigError for a comparison of several copies of the variables if there is one."""
    mirrored = config.variable_update == "mirrored"
    layout = lay_out(devices, config.tower_batch, config.accumulate_steps, config.most_workers, mirrored)
    if layout.num_replicas == 1 and config.check_mirrors_every_steps:
        raise errors.ConfigError(
            f"--check_mirrors_every_steps={config.check_mirrors_every_steps}: there is one copy of the variables. The "
            "option is for several workers, or for --variable_update=mirrored with several towers."
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
    workload: Workload, examples: Examples, config: Config, layout: Layout, examples_seen: tf.Variable,
    locate: Callable | None, is_compiled: bool,
) -> Stream:  # fmt: skip
    """Makes the stream: a batch for every tower, from the position that the run has come to."""
    v1.set_random_seed(config.seed & 0x7FFFFFFF)  # of the operations that --allow_stateful_random allows
    end = config.last_step(examples.num_examples) * layout.global_batch
    transfer = choose_transfer(config.augment_on, workload, examples, layout.devices, end)
    with v1.name_scope("input"):
        return training_stream(workload, examples, config.seed, examples_seen, layout, transfer, locate, is_compiled)


def _context(config: Config, layout: Layout, epochs_seen: tf.Tensor) -> Context:
    """Returns the context from which each tower's is made; its index is that of this worker's first tower."""
    return Context(
        tower=layout.first_tower,
        towers=len(layout.devices) * layout.num_workers,
        by_tower=config.batch_norm == "tower",
        epochs_seen=epochs_seen,
    )


def _check_towers(workload: Workload, examples: Examples, config: Config, outputs: Tensors, tower: BuiltTower) -> None:
    """Raises GraphError for too few outputs, ConfigError for --elastic with normalisation over all towers."""
    check_classes(workload, examples, outputs, workload.loss)
    if config.elastic and config.batch_norm == "global" and tower.context.normalized:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: workload {workload.name} normalises batches "
            f"({tower.context.normalized[0]}), which takes all towers at a time, and their number changes. Leave the "
            "option out, or normalise by tower (--batch_norm=tower)."
        )


def _stop_request(layout: Layout, dtype: tf.DType) -> tuple[list[tf.Tensor], tf.Operation | None]:
    """Returns scalars, above 0 once this worker asks all to end, and the op that asks; none without other workers."""
    if layout.num_workers == 1:
        return [], None
    asked = v1.get_variable("stopping", [], dtype, v1.zeros_initializer(), trainable=False,
                            collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
    return [asked.read_value()], asked.assign(1, read_value=False)


def _updates(
    config: Config, rate: tf.Tensor, context: Context, counters: Counters, replicas: Sequence[Replica]
) -> list[Callable[[], tf.Operation]]:
    """Returns over replicas a function that builds the update; the optimizers' variables are there already."""

    def optimizer(group: ParamGroup, grads: GradientsAndVariables) -> tuple[v1.train.Optimizer, tf.Tensor | None]:
        is_double = any(variable.dtype.base_dtype.real_dtype == tf.float64 for _, variable in grads)
        with tf.device(HOST):  # which has done with it long before the devices need it
            exact = tf.cast(group_rate(rate, context.epochs_seen, group), tf.float64 if is_double else tf.float32)
            decay = exact * config.decay if config.decay else None
        iterations = config.muon_iterations if group.muon else 0
        momentum = config.momentum if group.momentum is None else group.momentum
        made = make_optimizer(config.optimizer, exact, momentum, config.nesterov, iterations)
        return made, decay

    return [
        prepare_update(replica, optimizer, context.param_groups, config.ema, counters.global_step)
        for replica in replicas
    ]


def _progress(config: Config, stream: Stream, built: Sequence[BuiltTower]) -> tuple[list, dict[str, tf.Tensor]]:
    """Returns ops that count what a step is done with, and the counts; none without a watchdog."""
    if not config.stall_timeout_secs:
        return [], {}
    return count_progress(
        {INPUT: stream.arrivals, **{f"tower_{i}": [tower.loss, *tower.last] for i, tower in enumerate(built)}}
    )


def _report(
    counters: Counters, replica: Replica, loss: tf.Tensor, rate: tf.Tensor, stopping: list[tf.Tensor],
    finite: tf.Tensor, scale: LossScale, counting: list[tf.Operation],
) -> StepReport:  # fmt: skip
    """Makes the small values of a step that running looks at."""
    with tf.control_dependencies([finite, *counting]), v1.name_scope("report"):
        return StepReport(
            step=counters.global_step.read_value(),
            examples=counters.examples_seen.read_value(),
            loss=loss,
            data_loss=replica.loss,
            learning_rate=rate,
            stopping=stopping[0] if stopping else tf.zeros([], loss.dtype),
            finite=finite,
            **scale.report(loss, finite),
        )


def _random_numbers(
    workload: Workload, stream: Stream, built: Sequence[BuiltTower], allow_stateful: bool
) -> RandomNumbers:
    """Names the random numbers in the towers; GraphError for those that make N towers differ from one."""
    first = built[0].context
    last = [built[0].loss.op, *(statistic.value.op for statistic in first.statistics)]
    if not stream.state:  # examples in an order of their own draw as they like: their iterator's state is saved
        last.append(stream.initializer)
    stateful = list(random_state.find(last))
    if stateful and not allow_stateful:
        random_state.refuse_stateful(workload.name, stateful)
    return RandomNumbers(tuple(first.draws.names), tuple(map(str, stateful)))


def _compared(built: Sequence[BuiltTower], mean_grads: GradientsAndVariables) -> Compared:
    statistics = built[0].context.statistics
    return Compared(
        losses=[tower.loss for tower in built],
        gradients={variable.op.name: gradient for gradient, variable in mean_grads},
        of_loss=[gradient for gradient, _ in built[0].gradients],
        assigned={each.moving.op.name: each.value for each in statistics if not each.momentum},
        normalizes=bool(built[0].context.normalized),
    )


def _saved(config: Config, layout: Layout, replicas: Sequence[Replica], all_reduce: AllReduce) -> SavedVariables:
    """Returns what a checkpoint holds, and the operations that look at it or spread it."""
    saved, copied = v1.global_variables(), replicas[0].variables.copied()
    with v1.name_scope("checks"):
        finite = {v.op.name: is_finite(v) for v in saved if v.dtype.is_floating}
    in_common = [v for v in saved if v.dtype.base_dtype != tf.string]  # texts are the positions of workers' iterators
    return SavedVariables(
        variables=saved,
        finite=finite,
        copied=tuple(variable.op.name for variable in copied) if layout.num_replicas > 1 else (),
        fingerprints=fingerprints(replicas, all_reduce) if config.check_mirrors_every_steps else None,
        broadcast=all_reduce.broadcast(in_common, layout.worker) if layout.num_workers > 1 else None,
    )
