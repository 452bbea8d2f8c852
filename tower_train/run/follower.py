"""What a worker does that is not the chief: it trains along, and writes nothing."""

import time

import tensorflow as tf

from tower_train.cluster import member
from tower_train.config import Config
from tower_train.graph import training
from tower_train.run import dtypes, hooks, input_stream, nonfinite, report, sessions, signals, watchdog
from tower_train.run.results import Result
from tower_train.run_dir import directory, manifest
from tower_train.workload import DataRequest, Workload

v1 = tf.compat.v1


def follow(path: str | None, workload: Workload, config: Config, session_hooks, me: member.Member) -> Result:
    """Trains along with the chief, from its values to its last step.

    Args:
      path: where the workload can be imported from, if that is known.
      workload, config: the chief's too.
      session_hooks: further hooks around each step.
      me: this process.

    Raises:
      UserError: what the chief raises too, what makes this worker another than the chief, or WorkerError.
    """
    began = time.perf_counter()
    before = directory.RunDirectory(config.train_dir).read(directory.RUN) if config.train_dir else {}
    config, notes = dtypes.resolve(config, before)
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset  # as the chief
    examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
    built = training.training_graph(workload, examples, config, me.placed)
    now = manifest.describe(workload, path, examples, config, me.placed, built.num_parameters)
    first_step, last_step = me.meet(manifest.same_everywhere(now, workload))
    place = me.place
    report.print_lines(
        [f"{place.name(place.index)} of {len(place.hosts)} trains along with {place.name(0)}, steps {first_step} to "
         f"{last_step}, on {', '.join(me.placed.names)}", *notes]
    )  # fmt: skip
    last = hooks.LastValues(built, hooks.TrainingClock())
    heeded = [hooks.Heeded(hook) for hook in session_hooks]
    most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
    guard = nonfinite.BatchGuard(built, most_in_a_row, None, _print)
    with built.graph.as_default(), signals.noted() as received:
        with watchdog.Watchdog(config.stall_timeout_secs, built.progress, _print) as dog:
            every_hook = [dog, last, guard]
            if config.check_mirrors_every_steps:
                every_hook.append(hooks.MirrorCheck(built, config.check_mirrors_every_steps))
            every_hook += [*heeded, hooks.StopHook(built, last_step, lambda: received.stopping or _ask(heeded))]
            with (
                me.failures_named(),
                sessions.opened(built, me.placed.session_config, every_hook, me=me) as session,
                input_stream.failures_named(built.data),
            ):
                while first_step < last_step and not session.should_stop():
                    session.run(built.train_op)
    step = last.step or first_step
    stopped_by = (
        received.stopping.name if received.stopping
        else "last step" if step >= last_step
        else "a session hook" if _ask(heeded) else member.ANOTHER
    )  # fmt: skip
    return Result(
        train_dir="", step=step, loss=last.loss,
        examples_per_sec=last.steps_per_sec and last.steps_per_sec * built.global_batch,
        seconds=time.perf_counter() - began, stopped_by=stopped_by, checkpoint=None, data=examples.name,
        notice=examples.notice, skipped_steps=guard.skipped,
    )  # fmt: skip


def _ask(heeded: list[hooks.Heeded]) -> bool:
    return any(hook.has_asked for hook in heeded)


def _print(line: str) -> None:
    report.print_lines([line])
