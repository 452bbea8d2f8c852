"""The steps of one start of a run: the session, what happens around each step, and what came out."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import member
from tower_train.config import Config
from tower_train.graph import devices, record
from tower_train.inference import evaluate_run
from tower_train.run import hooks, input_stream, nonfinite, report, saving, sessions, signals, watchdog
from tower_train.run.results import Result
from tower_train.run_dir import checkpoint, directory, events
from tower_train.run_dir.metrics import MetricsFile

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run, ready to do its steps from first_step to last_step.

    Attributes:
      restored: path of the checkpoint it begins at; None at step 0.
      dump: what writes down the batch of (step, first position) and returns its path, or None.
    """

    config: Config
    placed: devices.Devices
    built: record.TrainingGraph
    run_dir: directory.RunDirectory
    checkpoints: checkpoint.Checkpoints
    restored: str | None
    first_step: int
    last_step: int
    dump: Callable[[int, int], str] | None


def do_steps(
    run: Start, evaluations: evaluate_run.DuringTraining, session_hooks, me
) -> tuple[Result, errors.UserError | None]:
    """Opens the session, does the steps, saves; returns what came out and what ended the run too early, if it did."""
    began = time.perf_counter()
    clock = hooks.TrainingClock()
    last = hooks.LastValues(run.built, clock)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.built.graph.as_default())
        received = stack.enter_context(signals.noted())
        console = stack.enter_context(report.Console(run.first_step, run.last_step))
        writer = stack.enter_context(contextlib.closing(events.open_writer(run.run_dir.path, console.line)))
        dog = watchdog.Watchdog(run.config.stall_timeout_secs, run.built.progress, console.line)
        stack.enter_context(dog)
        stack.enter_context(contextlib.closing(evaluations))
        # TensorBoard then drops what an interrupted start logged of this step and later ones.
        writer.add_session_log(v1.SessionLog(status=v1.SessionLog.START), run.first_step + 1)
        guard, saving, others = _hooks(run, console, clock, writer, dog, evaluations, received)
        restore = functools.partial(run.checkpoints.restore, path=run.restored) if run.restored else None
        heeded = [hooks.Heeded(hook) for hook in session_hooks] if me else []
        best, failure = evaluations.best, None

        def is_over():
            return received.stopping or best.is_over or any(hook.has_asked for hook in heeded)

        hooks_in_order = [dog, last, guard, *others, *(heeded or session_hooks),
                          hooks.StopHook(run.built, run.last_step, is_over)]  # fmt: skip
        try:
            with (
                me.failures_named() if me else contextlib.nullcontext(),
                sessions.opened(run.built, run.placed.session_config, hooks_in_order, restore, me) as session,
                input_stream.failures_named(run.built.data),
            ):
                has_steps = run.first_step < run.last_step and not best.is_over
                if evaluations.begin(run.first_step, run.last_step):
                    saving.evaluate(run.restored)
                # Several workers end after the same step, and so see to it in a hook.
                while has_steps and (me or not best.is_over) and not session.should_stop():
                    session.run(run.built.train_op)
        except (errors.NonFiniteError, errors.MirrorError) as error:
            failure = error
    step, signal_received = last.step or run.first_step, received.stopping
    result = Result(
        train_dir=str(run.run_dir.path),
        step=step,
        loss=last.loss,
        examples_per_sec=last.steps_per_sec and last.steps_per_sec * run.built.global_batch,
        seconds=time.perf_counter() - began,
        training_secs=last.training_secs,
        stopped_by=str(failure) if failure else signal_received.name if signal_received
        else "last step" if step >= run.last_step
        else best.why if best.is_over
        else "a session hook" if not me or any(hook.has_asked for hook in heeded) else member.ANOTHER,
        checkpoint=next(reversed(checkpoint.existing(run.run_dir.path)), None),
        failed_saves=saving.failures,
        skipped_steps=guard.skipped,
    )  # fmt: skip
    if saving.error and not failure:
        failure = errors.SaveError(f"training ended at step {step}, but {saving.error}. The same command goes on.")
    return result, failure


def _hooks(run: Start, console, clock: hooks.TrainingClock, writer, dog: watchdog.Watchdog, evaluations, received):
    """The guard, what saves, and all but the guard in the order in which they look at a step: nothing is logged or
    saved of one that stops the run because it is not finite."""
    built, config = run.built, run.config
    metrics = MetricsFile(run.run_dir.path / directory.METRICS, console.line)

    def save(session, step: int) -> str:
        with dog.doing("a save"):
            nonfinite.check_variables(session, built, step)
            run.run_dir.keep()
            # A run that is killed from here on goes on after this step: its records must reach it.
            metrics.flush()
            writer.flush()
            if built.stream_state:
                session.run(built.stream_state.note)
            return run.checkpoints.save(session, step)

    def evaluate(path: str) -> None:
        with clock.stopped(), dog.doing("an evaluation"):
            for line in evaluations.evaluate(path):
                console.line(line)

    most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
    guard = nonfinite.BatchGuard(built, most_in_a_row, run.dump, console.line)
    saving_hook = saving.CheckpointHook(
        built, save, config.save_every_steps, lambda step: evaluations.is_due(step, run.last_step), evaluate,
        received.take_save_request, console.line,
    )  # fmt: skip
    others = [input_stream.StateHook(built, run.last_step)] if built.stream_state else []
    others += [hooks.LogHook(built, config.log_every_steps, clock, console, metrics, writer)]
    if config.summary_every_steps:
        others.append(hooks.SummaryHook(built, config.summary_every_steps, writer))
    # After the log line, before the save.
    if config.check_mirrors_every_steps:
        others.append(hooks.MirrorCheck(built, config.check_mirrors_every_steps))
    others.append(saving_hook)
    return guard, saving_hook, others
