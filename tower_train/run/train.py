"""One start of a run, the same path in every worker: prepare, announce, run, conclude."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership, RunOver, exit_at_once, join, join_elastic
from tower_train.cluster.task import Task, find_task
from tower_train.cluster.watchdog import StepWatchdog
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import devices, step_failures
from tower_train.graph.layout import on_host
from tower_train.options import rules
from tower_train.run import (
    actions,
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
            return results.without_part(over, config.stop_after_no_gain_epochs)
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
        lines += report.elastic_line(start.config.elastic, start.graph.layout.towers_of_each)
    else:
        lines = [report.joining_line(membership.task, steps_done, end, membership.devices.names)]
    say(*lines, *start.notes)
    return dataclasses.replace(start, steps_done=steps_done, has_steps=steps_done < end)


def run(
    start: Start,
    session_hooks: Sequence[v1.train.SessionRunHook],
    received: signals.Received,
    membership: Membership,
) -> tuple[Result, errors.UserError | None]:
    """Opens the session, does the steps and saves; returns the result, and the error that ended the steps, if any."""
    began, graph, failure = time.perf_counter(), start.graph, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(graph.graph.as_default())
        steps = Steps(start, session_hooks, received, membership, stack)
        try:
            with (
                membership.failures_named(),
                step_failures.named(graph.examples.name, start.workload.name),
                sessions.open_session(graph, membership, start.last_step, start.restore) as session,
            ):
                steps.do(session)
        except (errors.NonFiniteError, errors.MirrorError) as error:
            failure = error
    result = steps.result(time.perf_counter() - began, failure)
    if (saver := steps.saver) and not failure:
        if saver.error:
            failure = results.save_error(result.step, saver.error)
        elif saver.evaluation_error:
            failure = results.evaluation_error(result.step, saver.evaluation_error)
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
    stopped_by = reason.text(start.config.stop_after_no_gain_epochs)
    return dataclasses.replace(result, reason=reason, stopped_by=stopped_by)


class Steps:
    """The steps of a start, and what is due after each.

    Attributes:
      saver: saves checkpoints; None in workers that are not the chief.
    """

    def __init__(
        self, start: Start, session_hooks: Sequence[v1.train.SessionRunHook], received: signals.Received,
        membership: Membership, stack: contextlib.ExitStack,
    ):  # fmt: skip
        config, graph = start.config, start.graph
        self._start, self._membership, self._stack = start, membership, stack
        self._clock = actions.TrainingClock()
        # A step with an all-reduce may have to be ended.
        is_averaged = graph.layout.num_workers > 1 or config.variable_update == "mirrored"
        noted = {"note_stall": membership.note_stall} if is_averaged else {}
        self._watchdog = stack.enter_context(StepWatchdog(config.stall_timeout_secs, graph.progress, **noted))
        self._user_hooks = hooks.UserHooks(session_hooks)
        self._user_hooks.begin()
        stack.callback(self._user_hooks.close)
        self._tally = actions.Tally(self._clock, start.steps_done)
        most_in_a_row = config.max_nonfinite_in_a_row if config.on_nonfinite == "skip" else None
        self._guard = nonfinite.Guard(graph, most_in_a_row, _dump(start))
        best = start.evaluations.best if start.is_chief else None
        self._stop = actions.Stop(received, membership, self._user_hooks, best)
        self.saver = None
        if start.is_chief:
            self._metrics = logs.MetricsFile(start.run_dir.path / directory.METRICS)
            self._writer = stack.enter_context(contextlib.closing(_event_writer(start)))
            write = saving.checkpoint_writer(
                graph, start.run_dir, start.resumed.checkpoints, [self._metrics, self._writer], membership.board
            )
            self.saver = saving.Saver(
                config.save_every_steps, write, start.evaluations, received, self._watchdog, self._clock,
                start.steps_done or None,
            )  # fmt: skip

    def do(self, session: v1.Session) -> None:
        """Does the steps, each of them followed by what is due."""
        start, stop, marked, summarizes = self._start, self._stop, contextlib.nullcontext, lambda step: False
        due = [self._tally, self._guard]  # the guards come first: a step that ends the run is neither logged nor saved
        due.append(actions.MirrorCheck(start.config.check_mirrors_every_steps, start.graph, session))
        self._watchdog.after_create_session(session)
        if start.is_chief:
            log, summary, profiler = self._reports()
            due += [log, summary, profiler, self.saver]
            marked, summarizes = profiler.step, summary.is_due
            self.saver.begin(start.graph, session)
        elif start.graph.stream.state:
            due.append(input_stream.SendPosition(
                session, start.graph, self._membership.board, start.config.is_saved, start.steps_done
            ))  # fmt: skip
        if self._user_hooks:
            due.append(actions.CallUserHooks(self._user_hooks, session))
            self._user_hooks.session_created(session)
        due.append(stop)
        stop.begin(start.graph, session)
        one_step = sessions.one_step(session, start.graph, self._user_hooks, summarizes)

        self._tally.begin()
        for step in range(start.steps_done + 1, start.last_step + 1) if start.has_steps and not stop.is_now else ():
            with self._watchdog.step(), marked(step):
                report = one_step(step)
            self._membership.note_step()
            for action in due:
                if action.is_due(step):
                    action(step, report)
            if stop.is_now:
                break
        for action in due:
            action.end(self._tally.step)

    def _reports(self) -> tuple[actions.Log, actions.Summary, profile.Profiler]:
        """Makes the chief's actions that tell of steps."""
        start, config = self._start, self._start.config
        bar = self._stack.enter_context(report.progress_bar(start.steps_done, start.last_step))
        log = actions.Log(
            config.log_every_steps, start.graph, start.steps_done, self._clock, bar, self._metrics, self._writer
        )
        profiler = profile.Profiler(config.profile_steps or (0, 0), start.run_dir.path, self._clock, self._watchdog)
        self._stack.callback(profiler.close)
        return log, actions.Summary(config.summary_every_steps, self._writer), profiler

    def result(self, seconds: float, failure: errors.UserError | None) -> Result:
        """Returns the result, given the seconds that it took and the error that ended the steps, if any."""
        start, tally, loss, step = self._start, self._tally, self._guard.loss, self._tally.step
        if failure:
            reason = StopReason.ERROR
        elif step >= start.last_step:
            reason = StopReason.LAST_STEP
        else:
            alone = start.graph.layout.num_workers == 1
            reason = self._stop.reason() or (StopReason.SESSION_HOOK if alone else StopReason.ANOTHER_WORKER)
        return Result(
            train_dir=str(start.run_dir.path) if start.is_chief else "",
            step=step,
            loss=None if loss is None else float(loss),
            examples_per_sec=tally.steps_per_sec and tally.steps_per_sec * start.graph.layout.global_batch,
            seconds=seconds,
            training_secs=tally.training_secs,
            reason=reason,
            stopped_by=str(failure) if failure else reason.text(start.config.stop_after_no_gain_epochs),
            checkpoint=next(reversed(checkpoint.existing(start.run_dir.path)), None) if start.is_chief else None,
            data=start.examples.name,
            notice=start.examples.notice,
            failed_saves=self.saver.failures if self.saver else 0,
            skipped_steps=self._guard.skipped,
        )


def _event_writer(start: Start) -> logs.EventWriter:
    """Opens the event files of a start with its graph and its options."""
    writer = logs.EventWriter(start.run_dir.path)
    # TensorBoard then drops what an interrupted start logged from this step on.
    writer.add(start.steps_done + 1, session_log=v1.SessionLog(status=v1.SessionLog.START))
    if start.drawing:
        writer.add(start.steps_done, graph_def=start.drawing)
    logs.add_options(writer, manifest.hyperparameters(start.run_json), start.steps_done)
    return writer


def _dump(start: Start) -> Callable[[int, int], str] | None:
    """Returns a function that writes the batch of (step, first position) to a file; None to write none."""
    config = start.config
    if not (start.is_chief and config.dump_bad_batch):
        return None
    whole_step = on_host(config.tower_batch, config.batches_per_step)
    return functools.partial(
        bad_batch.write, start.run_dir.path, start.workload, start.examples, config.seed, whole_step
    )
