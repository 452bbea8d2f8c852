"""train: from a workload and a config to a trained network in a train_dir."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph import build, devices
from tower_train.run import (
    bad_batch,
    checkpoint,
    cluster,
    data_check,
    directory,
    evaluate_run,
    events,
    follower,
    hooks,
    input_stream,
    manifest,
    member,
    nonfinite,
    recovery,
    report,
    saving,
    sessions,
    signals,
    watchdog,
)
from tower_train.run.metrics import MetricsFile
from tower_train.run.results import Result
from tower_train.workload import DataRequest, Workload, load

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class _Run:
    """One start of a run, ready to do its steps from first_step to last_step.

    Attributes:
      restored: path of the checkpoint it begins at; None at step 0.
      dump: what writes down the batch of (step, first position) and returns its path, or None.
    """

    config: Config
    placed: devices.Devices
    built: build.TrainingGraph
    run_dir: directory.RunDirectory
    checkpoints: checkpoint.Checkpoints
    restored: str | None
    first_step: int
    last_step: int
    dump: Callable[[int, int], str] | None


def train(
    workload: Workload | str,
    config: Config,
    session_hooks: Sequence[v1.train.SessionRunHook] = (),
    workload_options: Mapping[str, Any] | None = None,
) -> Result:
    """Trains, or goes on training, in config.train_dir.

    Args:
      workload: what to train: a record, or its import path.
      config: everything else.
      session_hooks: further hooks around each step.
      workload_options: values of the workload's own options, by name.

    Raises:
      UserError: something the user can mend; the message says how.
    """
    path, workload = (workload, load(workload)) if isinstance(workload, str) else (None, workload)
    workload = workload.with_options(workload_options or {})
    workload.check_dataset(config.dataset)
    config, place = cluster.find(config)
    placed = devices.place(config)
    if place is None:
        return _train(path, workload, config, placed, session_hooks)
    with member.Member(place, placed, config.worker_timeout_secs, config.wait_for_workers) as me:
        if place.is_chief:
            result = _train(path, workload, config, placed, session_hooks, me)
        else:
            result = follower.follow(path, workload, config, session_hooks, me)
        me.leave()
        return result


def _train(path: str | None, workload: Workload, config: Config, placed, session_hooks, me=None) -> Result:
    """Trains by itself, or as the chief of several workers, as whom `me` stands."""
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with run_dir.locked(), signals.survived(signals.SAVING):
        before = run_dir.read(directory.RUN)
        # What `auto` chose at the first start is what the run stays with.
        dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
        examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
        input_stream.check_options(examples, config)
        built = build.training_graph(workload, examples, config, me.placed if me else placed)
        now = manifest.describe(workload, path, examples, config, placed, built.num_parameters)
        notes = run_dir.warnings() + manifest.check_resume(run_dir.path, before, now, config.override, workload.options)
        dump = functools.partial(bad_batch.write, run_dir.path, workload, examples, config)
        run = _prepare(config, placed, built, run_dir, notes, bool(before), dump if config.dump_bad_batch else None)
        if config.check_data and not run.restored:
            notes += data_check.warnings(workload, examples)
        if me:
            me.meet(manifest.same_everywhere(now, workload), run.first_step)
        recovery.remove_leftovers(run_dir.path)
        run_dir.cut_metrics(run.first_step)
        run_dir.write(directory.RUN, now)
        report.print_lines(report.opening_lines(now, str(run_dir.path), run.first_step, run.last_step) + notes)
        evaluations = evaluate_run.DuringTraining(workload, config, placed, examples, run_dir)
        result, failure = _do_steps(run, evaluations, session_hooks, me)
        result = dataclasses.replace(result, data=examples.name, notice=examples.notice)
        try:
            # A start that did no step leaves the result of the one that did.
            if result.loss is not None or run_dir.read(directory.RESULT).get("step") != result.step:
                run_dir.update(directory.RESULT, dataclasses.asdict(result) | evaluations.results())
            elif failure:
                run_dir.update(directory.RESULT, {"stopped_by": result.stopped_by})
        except errors.RunError as error:
            failure = failure or errors.SaveError(
                f"training ended at step {result.step}, but {str(error).rstrip('.')}. The same command goes on."
            )
        if not failure or isinstance(failure, errors.SaveError):
            report.print_lines(report.closing_lines(result, run.last_step, path is not None))
        if failure:
            raise failure
        return result


def _prepare(config, placed, built, run_dir, notes: list[str], is_known: bool, dump) -> _Run:
    """Finds the checkpoint to begin at; adds to notes what it does not hold, and which were damaged."""
    last_step = config.last_step(built.num_examples)
    with built.graph.as_default():
        checkpoints = checkpoint.Checkpoints(run_dir.path, built.variables, config.keep_checkpoints)
        newest = checkpoint.latest(run_dir.path)
        if not newest:
            return _Run(config, placed, built, run_dir, checkpoints, None, 0, last_step, dump)
        if not is_known and not config.override:
            raise errors.RunError(
                f"--train_dir={run_dir.path} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of "
                "this program. Give another directory, or --override to start from that checkpoint."
            )
        newest, damaged = recovery.newest_intact(run_dir.path)
        notes += damaged
        fresh = checkpoints.plan_restore(newest, config.override)
        notes += [f"Not in {newest}, initialised afresh: {', '.join(fresh)}."] if fresh else []
        return _Run(config, placed, built, run_dir, checkpoints, newest, checkpoint.step_of(newest), last_step, dump)


def _do_steps(
    run: _Run, evaluations: evaluate_run.DuringTraining, session_hooks, me
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
        hooks_in_order, failure = [dog, last, guard, *others, *session_hooks], None
        try:
            with (
                me.failures_named() if me else contextlib.nullcontext(),
                sessions.opened(run.built, run.placed.session_config, hooks_in_order, restore, me) as session,
                input_stream.failures_named(run.built.data),
            ):
                if evaluations.best.begin(run.first_step):
                    saving.evaluate(run.restored)
                # Several workers end after the same step, and so see to it in a hook.
                best = evaluations.best
                while run.first_step < run.last_step and (me or not best.is_over) and not session.should_stop():
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
        stopped_by=str(failure) if failure else signal_received.name if signal_received
        else "last step" if step >= run.last_step
        else evaluations.best.why if evaluations.best.is_over else "another worker" if me else "a session hook",
        checkpoint=next(reversed(checkpoint.existing(run.run_dir.path)), None),
        failed_saves=saving.failures,
        skipped_steps=guard.skipped,
    )  # fmt: skip
    if saving.error and not failure:
        failure = errors.SaveError(f"training ended at step {step}, but {saving.error}. The same command goes on.")
    return result, failure


def _hooks(run: _Run, console, clock: hooks.TrainingClock, writer, dog: watchdog.Watchdog, evaluations, received):
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
        built, save, config.save_every_steps, config.eval_every_steps, evaluate, received.take_save_request,
        console.line,
    )  # fmt: skip
    others = [input_stream.StateHook(built, run.last_step)] if built.stream_state else []
    others += [hooks.LogHook(built, config.log_every_steps, clock, console, metrics, writer)]
    if config.summary_every_steps:
        others.append(hooks.SummaryHook(built, config.summary_every_steps, writer))
    # After the log line, before the save.
    if config.check_mirrors_every_steps:
        others.append(hooks.MirrorCheck(built, config.check_mirrors_every_steps))
    others += [saving_hook, hooks.StopHook(built, run.last_step, lambda: received.stopping or evaluations.best.is_over)]
    return guard, saving_hook, others
