"""The training graph: the parts of one step, in the order in which they happen."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import tensorflow as tf

from tower_train.config import Config
from tower_train.graph import gradients, outputs, summaries, xla
from tower_train.graph.collectives import AllReduce
from tower_train.graph.context import Context
from tower_train.graph.devices import HOST
from tower_train.graph.draws import Draws
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.order import choose_order
from tower_train.graph.record import TrainingGraph
from tower_train.graph.replica import Changes, average, built_towers, make_replicas
from tower_train.graph.schedule import learning_rate
from tower_train.graph.step_plan import StepPlan
from tower_train.graph.stream import Stream, training_stream
from tower_train.graph.towers import tower_loss, tower_scope
from tower_train.graph.update import Counters, prepare_update, update_if_finite

v1 = tf.compat.v1


def build_step(plan: StepPlan) -> TrainingGraph:
    """Builds one step: a batch becomes the towers' losses, their gradients one mean, the mean one update.

    Raises GraphError if the network breaks a rule of the towers, ConfigError for an option that is useless for it.
    """
    config, layout = plan.config, plan.layout
    with tf.Graph().as_default() as graph, tf.device(HOST):
        v1.set_random_seed(config.seed & 0x7FFFFFFF)  # of the operations that --allow_stateful_random allows
        counters = Counters(layout.global_batch, plan.examples.num_examples)  # the run's place, in its checkpoints
        stream = _open_stream(plan, counters.examples_seen)  # batches of all towers, and their examples' positions
        rate = learning_rate(config, plan.examples.num_examples, counters.examples_seen)
        scale = LossScale(plan.dtype)  # 1 except for float16
        replicas = make_replicas(layout.replicas, plan.is_compiled)  # one on the host, or one on each tower's device
        shared = Context(  # what the contexts of all towers have in common
            towers=len(layout.devices) * layout.num_workers,
            by_tower=config.batch_norm == "tower",
            epochs_seen=counters.epochs_seen,
        )

        for tower, batch, position in zip(layout.towers, stream.batches, stream.positions, strict=True):
            replica = replicas[tower.replica]
            if tower.turn:  # so that the activations of one batch at a time are in a device's memory
                batch, position = replica.after_previous_tower((batch, position))
            # by the position in the stream, never by the tower: N towers draw what one draws
            draws = Draws(config.seed, position, layout.tower_batch, counters.examples_seen)
            with tower_scope(plan, shared, tower, replica.variables, batch, draws) as context:  # device, names, XLA
                # the last tower's logits stand for all in the checks below
                logits, loss = tower_loss(plan.workload, *batch, plan.dtype, plan.class_weights)
                stream.order.note_losses(logits, batch[1])
                replica.add(context, loss, scale)  # and its gradients

        towers = built_towers(replicas)
        outputs.check_towers(plan, logits, towers[0])

        all_reduce = AllReduce(layout.replicas, plan.all_reduce, layout.num_workers, layout.weight)
        mean = average(replicas, all_reduce, _gradient_changes(config))  # over all towers of all workers
        parts = [
            # all towers' contexts share one dict of groups, which their layers have filled
            prepare_update(replica, config, rate, counters, shared.param_groups)
            for replica in replicas  # from the same means, so that all copies stay the same to the bit
        ]
        parts += stream.order.prepare_update(counters.examples_seen.read_value(), layout.offsets, all_reduce.gather)
        skips = config.on_nonfinite == "skip"
        # finite.op, a conditional, is the step
        finite = update_if_finite(replicas, mean, parts, counters, scale, skips, when=stream.renewed)
        if plan.is_compiled:
            xla.prepare(graph, plan.session_config)

        counting, progress = outputs.progress(plan, stream, towers)
        return TrainingGraph(
            graph,
            plan,
            stream,
            train_op=finite.op,
            report=outputs.step_report(counters, rate, mean, scale, finite, stream, counting),
            summary=summaries.step_summary(mean.gradients, stream.batches[0][0], finite.op)
            if config.summary_every_steps
            else None,
            saved=outputs.saved_variables(plan, replicas, all_reduce),
            stateful=outputs.stateful(plan, stream, towers[0]),
            compared=outputs.compared(mean, towers),
            choice=stream.order.choice(counters.examples_seen.read_value()),
            ask_to_stop=mean.ask_to_stop,
            progress=progress,
            notes=outputs.notes(plan, stream, logits, towers[0]),
        )


def _gradient_changes(config: Config) -> Changes:
    """Returns what changes the mean gradients, in order; they hold the regularizers' already."""
    clip = functools.partial(gradients.clip, limit=config.clip_gradients)
    return [clip] if config.clip_gradients else []


def _open_stream(plan: StepPlan, examples_seen: tf.Variable) -> Stream:
    """Opens the stream at the position that the run has come to."""
    config, layout = plan.config, plan.layout
    order = choose_order(config.keep_hardest, plan.workload, plan.examples, config.seed, layout.global_batch)
    with v1.name_scope("input"):
        return training_stream(plan.workload, plan.examples, config.seed, examples_seen, layout, plan.transfer, order)


@contextlib.contextmanager
def opened(
    built: TrainingGraph, set_variables: Callable[[v1.Session], None] | None = None, target: str = ""
) -> Iterator[v1.Session]:
    """Opens a session, ready for its first step.

    Args:
      built: fetching its report does a step.
      set_variables: gives all variables their values, such as a checkpoint's; None for initial ones.
      target: the server of this worker; empty for a process by itself.
    """
    with built.graph.as_default():
        others = tf.group(v1.local_variables_initializer(), v1.tables_initializer())
    # Not as the default session: a program may have the loop over the steps, and is not to find itself in this graph.
    session = v1.Session(target, built.graph, built.plan.session_config)
    try:
        if set_variables:
            set_variables(session)
        else:
            session.run([variable.initializer for variable in built.saved.variables])
        # After that, so that copies have the variables' values and the stream starts at the position that these tell.
        session.run(others)
        # by itself, as actions run it too: a session prepares, and XLA compiles, each set of fetches anew
        session.run(built.stream.initializer)
        yield session
    finally:
        with contextlib.suppress(tf.errors.AbortedError, tf.errors.UnavailableError):  # of a lost worker
            session.close()
        gradients.forget_functions(built.graph)
