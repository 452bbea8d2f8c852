"""One start of a run, the same path in every worker: prepare, announce, run, conclude."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.elastic import join_elastic
from tower_train.cluster.membership import exit_at_once, join
from tower_train.cluster.single_process import RunOver, SingleProcess
from tower_train.cluster.task import Task, find_task
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import devices, input_failures, kernels, stream
from tower_train.options import rules
from tower_train.run import (
    bad_batch,
    hooks,
    input_stream,
    nonfinite,
    profile,
    program,
    report,
    results,
    saving,
    sessions,
    signals,
)
from tower_train.run.evaluations import TEST
from tower_train.run.prepare import Start, prepare, rebuilt
from tower_train.run.results import Result, StopReason
from tower_train.run.watchdog import Watchdog
from tower_train.run_dir import checkpoint, directory, logs, manifest
from tower_train.workload import Workload, load

v1 = tf.compat.v1


def train(
    workload: Workload | str,
    config: Config,
    session_hooks: Sequence[v1.train.SessionRunHook] = (),
    workload_options: Mapping[str, Any] | None = None,
    if_stuck: Callable[[errors.WorkerError], None] = lambda _: None,
) -> Result:
    """Trains, or resumes training, in config.train_dir.

    Args:
      workload: a record, or its import path.
      config: the trainer's options.
      session_hooks: further hooks around each step.
      workload_options: values of the workload's own options, by name.
      if_stuck: called before the process is ended because a worker is missing and the step that waits for it cannot be
        left.

    Raises:
      WorkerError: a worker is missing; also with wait_for_workers or elastic, as only `python -m tower_train` restarts
        itself. With elastic also: the run goes on with another number of workers.
      UserError: another error that the user can correct; the message says how.
    """
    if isinstance(workload, str):
        path, workload = workload, load(workload, config.train_dir)
    else:
        path = program.import_path(workload)
    workload = workload.with_options(workload_options or {})
    workload.check_dataset(config.dataset)
    task = find_task(config.worker_hosts, config.task_index)
    hosts, index = (None, None) if task.is_alone else (",".join(task.hosts), task.index)
    config = dataclasses.replace(config, worker_hosts=hosts, task_index=index)
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    kernels.choose(config.deterministic, config.tensor_float_32)
    received = signals.Received()
    leave = functools.partial(_leave_at_once, received, if_stuck)
    with (
        signals.survived(signals.SAVING),
        _join(task, config, leave) as membership,
        run_dir.locked() if task.is_chief else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        try:
            start = announce(prepare(path, workload, config, run_dir, membership, stack), membership)
        except RunOver as over:
            return results.without_part(over, config.stop_after_no_gain_epochs)
        with signals.noted(received):
            try:
                result = conclude(start, *run(start, session_hooks, received, membership), membership)
            except errors.WorkerError as error:
                error.exit_status = _status(error, received)
                if not error.environment:
                    membership.remember(error)
                raise
    if result.reason is StopReason.RESIZED:
        raise membership.resized()
    return result


def _join(task: Task, config: Config, leave_at_once: Callable[[errors.WorkerError], None]) -> SingleProcess:
    placed, timeouts = devices.place(config), (config.worker_timeout_secs, config.start_timeout_secs)
    if not config.elastic:
        return join(task, placed, *timeouts, config.wait_for_workers, leave_at_once)
    if task.is_alone:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: there is one worker. Name all in --worker_hosts, TF_CONFIG or Slurm."
        )
    return join_elastic(task, placed, *timeouts, rules.parse_elastic(config.elastic), leave_at_once)


def _leave_at_once(
    received: signals.Received, if_stuck: Callable[[errors.WorkerError], None], error: errors.WorkerError
) -> None:
    error.exit_status = _status(error, received)
    if_stuck(error)
    exit_at_once(error)


def _status(error: errors.WorkerError, received: signals.Received) -> int:
    """Returns the exit status for a missing worker; a worker that was told to end is not to be restarted."""
    is_to_start_again = error.exit_status == errors.WorkerError.exit_status
    return 128 + received.stopping if is_to_start_again and received.stopping else error.exit_status


def announce(start: Start, membership: SingleProcess) -> Start:
    """Agrees on the steps with the other workers and prints the first lines."""
    is_over, built_for = start.is_chief and start.evaluations.best.is_over, membership.devices
    steps_done, end = membership.agree(
        lambda: manifest.same_everywhere(start.run_json, start.workload),
        start.steps_done,
        start.steps_done if is_over else start.last_step,
    )
    if membership.devices is not built_for:
        start = rebuilt(start, membership)
    if start.is_chief:
        checkpoint.remove_leftovers(start.run_dir.path)
        start.run_dir.cut_metrics(steps_done)
        start.run_dir.write(directory.RUN, start.run_json)
        lines = report.opening_lines(start.run_json, str(start.run_dir.path), steps_done, start.last_step)
        lines += report.elastic_line(start.config.elastic, start.graph.towers_of_each)
    else:
        lines = [report.joining_line(membership.task, steps_done, end, membership.devices.names)]
    say(*lines, *start.notes)
    return dataclasses.replace(start, steps_done=steps_done, has_steps=steps_done < end)


def run(
    start: Start,
    session_hooks: Sequence[v1.train.SessionRunHook],
    received: signals.Received,
    membership: SingleProcess,
) -> tuple[Result, errors.UserError | None]:
    """Opens the session, does the steps and saves; returns the result, and the error that ended the steps, if any."""
    began, graph, failure = time.perf_counter(), start.graph, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(graph.graph.as_default())
        step_hooks = StepHooks(start, session_hooks, received, stack, membership)
        restore = start.resumed.restore if start.is_chief else None
        try:
            with (
                membership.failures_named(),
                _opened(start, membership, step_hooks, restore) as session,
                input_failures.named(graph.data, start.workload.name),
                kernels.missing_named(),
            ):
                while start.has_steps and not session.should_stop():
                    session.run(graph.train_op)
        except (errors.NonFiniteError, errors.MirrorError) as error:
            failure = error
    result = _result(start, step_hooks, time.perf_counter() - began, failure)
    if (saver := step_hooks.saver) and not failure:
        if saver.error:
            failure = results.save_error(result.step, saver.error)
        elif saver.evaluation_error:
            failure = results.evaluation_error(result.step, saver.evaluation_error)
    return result, failure


def _opened(
    start: Start, membership: SingleProcess, step_hooks: "StepHooks", restore
) -> v1.train.SingularMonitoredSession:
    """Opens the session of a start, whose stream may fail on its first examples."""
    with input_failures.named(start.graph.data, start.workload.name):
        return sessions.open_session(
            start.graph, membership, step_hooks.in_order, restore, start.config.start_timeout_secs
        )


def conclude(start: Start, result: Result, failure: errors.UserError | None, membership: SingleProcess) -> Result:
    """Writes the result, prints the last lines and leaves together with the other workers."""
    if start.is_chief and result.reason is StopReason.RESIZED:
        failure = None  # a save that failed costs the steps since the one before
    elif start.is_chief:
        failure = results.write(start.run_dir, result, failure, start.evaluations.results())
        if not failure or isinstance(failure, errors.SaveError | errors.EvaluationError):
            path = start.run_json["config"]["workload"]
            say(*report.closing_lines(result, start.last_step, path, start.evaluations.last.get(TEST)))
    if failure:
        raise failure
    known = None if result.reason is StopReason.ANOTHER_WORKER else result.reason.value
    reason = StopReason(membership.leave(known) or StopReason.ANOTHER_WORKER)
    stopped_by = reason.text(start.config.stop_after_no_gain_epochs)
    return dataclasses.replace(result, reason=reason, stopped_by=stopped_by)


class StepHooks:
    """The hooks of a start's steps, closed with the stack.

    Attributes:
      in_order: all hooks, in the order in which they see a step.
      last_values: keeps the values of the last step.
      guard: watches for steps that are not finite.
      saver: saves checkpoints; None in workers that are not the chief.
    """

    def __init__(
        self, start: Start, session_hooks: Sequence[v1.train.SessionRunHook], received: signals.Received,
        stack: contextlib.ExitStack, membership: SingleProcess,
    ):  # fmt: skip
        config, graph, clock = start.config, start.graph, hooks.TrainingClock()
        self._start, self._received, self._membership = start, received, membership
        self._user_hooks = [hooks.UserHook(hook) for hook in session_hooks]
        # A step with an all-reduce may have to be ended.
        noted = (
            {"note_stall": membership.note_stall}
            if graph.num_workers > 1 or config.variable_update == "mirrored"
            else {}
        )
        watchdog = stack.enter_context(Watchdog(config.stall_timeout_secs, graph.progress, **noted))
        self.last_values = hooks.LastValues(graph, clock)
        most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
        self.guard = nonfinite.BatchGuard(graph, most_in_a_row, _dump(start))
        # The guards come first: a step that ends the run is neither logged nor saved.
        self.in_order = [watchdog, self.last_values, self.guard]
        if config.check_mirrors_every_steps:
            self.in_order.append(hooks.MirrorCheck(graph, config.check_mirrors_every_steps))
        if graph.stream_state:
            self.in_order.append(input_stream.StateHook(graph, start.last_step))
            if not start.is_chief:
                self.in_order.append(input_stream.SendHook(graph, membership.states, config.is_saved))
        chief_hooks = self._chief_hooks(clock, watchdog, stack) if start.is_chief else []
        self.saver = chief_hooks[-1] if chief_hooks else None
        self.in_order += [*chief_hooks, *self._user_hooks, hooks.StopHook(graph, start.last_step, self.early_stop)]

    def early_stop(self) -> StopReason | None:
        """Returns the reason why the run ends before its last step; None if it does not."""
        if self._start.is_chief and self._start.evaluations.best.is_over:
            return StopReason.NO_GAIN
        if self._received.stopping:
            return StopReason(self._received.stopping.name)
        if self._membership.is_to_resize:
            return StopReason.RESIZED
        return StopReason.SESSION_HOOK if any(hook.has_asked for hook in self._user_hooks) else None

    def _chief_hooks(
        self, clock: hooks.TrainingClock, watchdog: Watchdog, stack: contextlib.ExitStack
    ) -> list[hooks.StepHook]:
        """Makes the hooks for log lines, summaries and, last, checkpoints."""
        start, received = self._start, self._received
        config, graph, path = start.config, start.graph, start.run_dir.path
        bar = stack.enter_context(report.progress_bar(start.steps_done, start.last_step))
        writer = stack.enter_context(contextlib.closing(logs.EventWriter(path)))
        # TensorBoard then drops what an interrupted start logged from this step on.
        writer.add(start.steps_done + 1, session_log=v1.SessionLog(status=v1.SessionLog.START))
        if start.drawing:
            writer.add(start.steps_done, graph_def=start.drawing)
        logs.add_options(writer, manifest.hyperparameters(start.run_json), start.steps_done)
        metrics = logs.MetricsFile(path / directory.METRICS)
        chief_hooks = [hooks.LogHook(graph, config.log_every_steps, clock, bar, metrics, writer)]
        if config.summary_every_steps:
            chief_hooks.append(hooks.SummaryHook(graph, config.summary_every_steps, writer, start.steps_done))
        if config.profile_steps:
            profiler = profile.ProfileHook(graph, config.profile_steps, path, clock, watchdog)
            chief_hooks.append(stack.enter_context(contextlib.closing(profiler)))
        write = saving.checkpoint_writer(
            graph, start.run_dir, start.resumed.checkpoints, [metrics, writer], self._membership.states
        )
        saver = saving.CheckpointHook(
            graph, config.save_every_steps, write, start.evaluations, received, watchdog, clock
        )
        saver.saved_step = start.steps_done or None
        return [*chief_hooks, saver]


def _dump(start: Start) -> Callable[[int, int], str] | None:
    """Returns a function that writes the batch of (step, first position) to a file; None to write none."""
    config = start.config
    if not (start.is_chief and config.dump_bad_batch):
        return None
    split = stream.Split(config.tower_batch, config.batches_per_step)
    return functools.partial(bad_batch.write, start.run_dir.path, start.workload, start.examples, config.seed, split)


def _result(start: Start, step_hooks: StepHooks, seconds: float, failure: errors.UserError | None) -> Result:
    last, saver = step_hooks.last_values, step_hooks.saver
    step = last.step or start.steps_done
    if failure:
        reason = StopReason.ERROR
    elif step >= start.last_step:
        reason = StopReason.LAST_STEP
    else:
        alone = start.graph.num_workers == 1
        reason = step_hooks.early_stop() or (StopReason.SESSION_HOOK if alone else StopReason.ANOTHER_WORKER)
    return Result(
        train_dir=str(start.run_dir.path) if start.is_chief else "",
        step=step,
        loss=last.loss,
        examples_per_sec=last.steps_per_sec and last.steps_per_sec * start.graph.global_batch,
        seconds=seconds,
        training_secs=last.training_secs if step > start.steps_done else None,
        reason=reason,
        stopped_by=str(failure) if failure else reason.text(start.config.stop_after_no_gain_epochs),
        checkpoint=next(reversed(checkpoint.existing(start.run_dir.path)), None) if start.is_chief else None,
        data=start.examples.name,
        notice=start.examples.notice,
        failed_saves=saver.failures if saver else 0,
        skipped_steps=step_hooks.guard.skipped,
    )
