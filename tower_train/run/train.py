"""One start of a run, the same path in every worker: prepare, announce, run, conclude."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.agreement import RunOver
from tower_train.cluster.membership import Membership, exit_at_once, join, join_elastic
from tower_train.cluster.task import Task, find_task
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import devices, step_failures
from tower_train.options import rules
from tower_train.run import actions, nonfinite, profile, report, results, saving, sessions, signals
from tower_train.run.actions import Running
from tower_train.run.evaluations import TEST
from tower_train.run.hooks import UserHooks
from tower_train.run.prepare import Start, prepare, rebuilt
from tower_train.run.results import Result, StopReason
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
      session_hooks: the user's hooks around each step.
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
        path = report.import_path(workload)
    workload = workload.with_options(workload_options or {})
    workload.check_dataset(config.dataset)
    task = find_task(config.worker_hosts, config.task_index)
    hosts, index = (None, None) if task.is_alone else (",".join(task.hosts), task.index)
    config = dataclasses.replace(config, worker_hosts=hosts, task_index=index)
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    devices.choose_kernels(config.deterministic, config.tensor_float_32)
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
            return results.without_part(over, config.early_stopping_patience_epochs)
        with signals.noted(received):
            try:
                result = conclude(start, *run(start, session_hooks, received, membership), membership)
            except errors.WorkerError as error:
                raise _for_this_worker(error, received) from error.__cause__
    if result.reason is StopReason.RESIZED:
        raise membership.resized()
    return result


def _join(task: Task, config: Config, leave_at_once: Callable[[errors.WorkerError], None]) -> Membership:
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
    error = _for_this_worker(error, received)
    if_stuck(error)
    exit_at_once(error)


def _for_this_worker(error: errors.WorkerError, received: signals.Received) -> errors.WorkerError:
    """Returns an error after which a worker that was told to end is not restarted."""
    if not received.stopping or error.exit_status != errors.WorkerError.exit_status:
        return error
    return errors.WorkerError(str(error), 128 + received.stopping, error.is_final, error.environment)


def announce(start: Start, membership: Membership) -> Start:
    """Agrees on the steps with the other workers, for whom it may build the graph again, and prints the first lines.

    The chief also removes what interrupted writes left, and writes run.json.
    """
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
        towers = start.graph.layout.towers_of_each
        lines = report.opening_lines(start.run_json, str(start.run_dir.path), steps_done, start.last_step, towers)
    else:
        lines = [report.joining_line(membership.task, steps_done, end, membership.devices.names)]
    say(*lines, *start.notes)
    return dataclasses.replace(start, steps_done=steps_done, end=end)


def run(
    start: Start,
    session_hooks: Sequence[v1.train.SessionRunHook],
    received: signals.Received,
    membership: Membership,
) -> tuple[Result, errors.UserError | None]:
    """Opens the session, does the steps and saves; returns the result, and the error that ended the steps, if any."""
    began, graph, user_hooks, failure = time.perf_counter(), start.graph, UserHooks(session_hooks), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(graph.graph.as_default())
        stack.callback(user_hooks.close)
        user_hooks.begin()
        # A step with an all-reduce may have to be ended.
        is_averaged = graph.layout.num_workers > 1 or start.config.variable_update == "mirrored"
        noted = {"note_stall": membership.note_stall} if is_averaged else {}
        watchdog = stack.enter_context(StepWatchdog(start.config.stall_timeout_secs, graph.progress, **noted))
        with (
            membership.failures_named(),
            step_failures.named(graph.examples.name, start.workload.name),
            sessions.open_session(graph, membership, start.last_step, start.restore) as session,
        ):
            watchdog.after_create_session(session)
            running = Running(start, session, membership, received, user_hooks, watchdog, actions.TrainingClock())
            steps = Steps(running, stack)
            try:
                steps.do()
            except (errors.NonFiniteError, errors.MirrorError) as error:
                failure = error
    result = steps.result(time.perf_counter() - began, failure)
    if steps.saver and not failure:
        failure = steps.saver.failure(result.step)
    return result, failure


def conclude(start: Start, result: Result, failure: errors.UserError | None, membership: Membership) -> Result:
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
    stopped_by = reason.text(start.config.early_stopping_patience_epochs)
    return dataclasses.replace(result, reason=reason, stopped_by=stopped_by)


class Steps:
    """The steps of a start, and the actions that may be due after each, in their order.

    Attributes:
      saver: saves checkpoints; None in workers that are not the chief.
    """

    def __init__(self, running: Running, stack: contextlib.ExitStack):
        self._running, self.saver = running, None
        self._tally, self._guard, self._stop = actions.Tally(running), nonfinite.Guard(running), actions.Stop(running)
        self._actions = [
            self._tally,
            self._guard,  # so early, as a step that ends the run is neither logged nor saved
            actions.MirrorCheck(running),
            *(self._chiefs_actions(stack) if running.start.is_chief else [saving.SendPosition(running)]),
            actions.CallUserHooks(running),
            self._stop,
        ]

    def _chiefs_actions(self, stack: contextlib.ExitStack) -> list[actions.Action]:
        """Makes the actions that write files; they are closed with the stack."""
        start, running = self._running.start, self._running
        bar = stack.enter_context(report.progress_bar(start.steps_done, start.last_step))
        metrics = logs.MetricsFile(start.run_dir.path / directory.METRICS)
        writer = stack.enter_context(contextlib.closing(_event_writer(start)))
        log, self._summary = actions.Log(running, bar, metrics, writer), actions.Summary(running, writer)
        self._profiler = stack.enter_context(contextlib.closing(profile.Profiler(running)))
        self.saver = saving.Saver(running, metrics, writer)
        return [log, self._summary, self._profiler, self.saver]

    def do(self) -> None:
        """Does the steps, each of them followed by what is due."""
        running, start, stop = self._running, self._running.start, self._stop
        is_summary_due, marked = lambda step: False, contextlib.nullcontext
        if start.is_chief:
            is_summary_due, marked = self._summary.is_due, self._profiler.step
            self.saver.begin()
        running.user_hooks.session_created(running.session)
        one_step = sessions.one_step(running.session, start.graph, running.user_hooks, is_summary_due)
        stop.begin()
        self._tally.begin()
        for step in start.steps if not stop.is_now else ():
            with running.watchdog.step(), marked(step):
                report = one_step(step)
            running.membership.note_step()
            for action in self._actions:
                if action.is_due(step):
                    action(step, report)
            if stop.is_now:
                break
        for action in self._actions:
            action.end(self._tally.step)

    def result(self, seconds: float, failure: errors.UserError | None) -> Result:
        """Returns the result, given the seconds that it took and the error that ended the steps, if any."""
        start, tally, loss, step = self._running.start, self._tally, self._guard.loss, self._tally.step
        alone = start.graph.layout.num_workers == 1
        if failure:
            reason = StopReason.ERROR
        elif step >= start.last_step:
            reason = StopReason.LAST_STEP
        else:
            reason = self._stop.reason() or (StopReason.SESSION_HOOK if alone else StopReason.ANOTHER_WORKER)
        return Result(
            train_dir=str(start.run_dir.path) if start.is_chief else "",
            step=step,
            loss=None if loss is None else float(loss),
            examples_per_sec=tally.steps_per_sec and tally.steps_per_sec * start.graph.layout.global_batch,
            seconds=seconds,
            training_secs=tally.training_secs if step > start.steps_done else None,
            reason=reason,
            stopped_by=str(failure) if failure else reason.text(start.config.early_stopping_patience_epochs),
            checkpoint=next(reversed(checkpoint.existing(start.run_dir.path)), None) if start.is_chief else None,
            data=start.examples.name,
            notice=start.examples.notice,
            failed_saves=self.saver.failures if self.saver else 0,
            skipped_steps=self._guard.skipped,
        )


def _event_writer(start: Start) -> logs.EventWriter:
    """Opens the event files of a start with its graph."""
    writer = logs.EventWriter(start.run_dir.path)
    # TensorBoard then drops what an interrupted start logged from this step on.
    writer.add(start.steps_done + 1, session_log=v1.SessionLog(status=v1.SessionLog.START))
    if start.drawing:
        writer.add(start.steps_done, graph_def=start.drawing)
    return writer
