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
from tower_train.cluster.membership import Membership, exit_at_once, join
from tower_train.cluster.task import Policy, Task, find_task
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import devices, shortages, step_failures, summaries
from tower_train.graph.record import StepReport
from tower_train.options import rules
from tower_train.proof import towers
from tower_train.run import actions, messages, nonfinite, results, saving, sessions, signals
from tower_train.run.actions import Running
from tower_train.run.hooks import UserHooks
from tower_train.run.prepare import Start, prepare, rebuilt, with_towers_compared
from tower_train.run.results import Result, StopReason
from tower_train.run.watchdog import StepWatchdog
from tower_train.run_dir import checkpoint, directory, logs, manifest
from tower_train.workload import Workload, load

v1 = tf.compat.v1


def train(
    workload: Workload | str,
    config: Config,
    session_hooks: Sequence[v1.train.SessionRunHook] = (),
    workload_options: Mapping[str, Any] | None = None,
    if_stuck: Callable[[errors.WorkerError], None] = lambda _: None,
    after_step: Callable[[int, StepReport], bool | None] | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    on_evaluate: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Trains, or resumes training, in config.train_dir.

    Args:
      workload: a record, or its import path.
      config: the trainer's options.
      session_hooks: the user's hooks around each step.
      workload_options: values of the workload's own options, by name.
      if_stuck: called before the process is ended because a worker is missing and the step that waits for it cannot be
        left.
      after_step: called after each step with its number and its report, such as report.loss, in numpy values; the run
        ends if it returns True. Without session_hooks a step takes no longer for it.
      on_log, on_evaluate: called in the chief with each record of metrics.jsonl: of the training (step, epoch, loss,
        ...), and of an evaluation (step, epoch, val_loss, metrics that begin with val_ and train_).

    Raises:
      WorkerError: a worker is missing; also with wait_for_workers or elastic, as only `python -m tower_train` restarts
        itself. With elastic also: the run goes on with another number of workers.
      UserError: another error that the user can correct; the message says how.
    """
    path, workload, config, task = _resolved(workload, config, workload_options or {})
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir.check_files()
    devices.refuse_auto_jit()
    devices.choose_kernels(config.deterministic, config.tensor_float_32)
    received = signals.Received()
    leave = functools.partial(_leave_at_once, received, if_stuck)
    with (
        _join(task, config, leave) as membership,
        run_dir.locked() if task.is_chief else contextlib.nullcontext(),
        contextlib.ExitStack() as stack,
    ):
        try:
            start = prepare(path, workload, config, run_dir, membership, stack)
            start = announce(start, membership, bool(session_hooks or after_step))
        except RunOver as over:
            return Result("", over.step, None, None, 0.0, StopReason(over.stopped_by), None)
        hooks = UserHooks(session_hooks, after_step, on_log, on_evaluate)
        with received.noted():
            try:
                result = conclude(start, run(start, hooks, received, membership), membership)
            except errors.WorkerError as error:
                raise _for_this_worker(error, received) from error.__cause__
    if result.reason is StopReason.RESIZED:
        raise membership.resized()
    return result


def _resolved(
    workload: Workload | str, config: Config, workload_options: Mapping[str, Any]
) -> tuple[str, Workload, Config, Task]:
    """Returns the import path of the workload; workload and config with all that is known; the task of this process."""
    if isinstance(workload, str):
        path, workload = workload, load(workload, config.train_dir)
    else:
        path = messages.import_path(workload)
    workload = workload.with_options(workload_options)
    workload.check_dataset(config.dataset)
    task = find_task(config.worker_hosts, config.task_index)
    hosts, index = (None, None) if task.is_alone else (",".join(task.hosts), task.index)
    return path, workload, dataclasses.replace(config, worker_hosts=hosts, task_index=index), task


def _join(task: Task, config: Config, leave_at_once: Callable[[errors.WorkerError], None]) -> Membership:
    if config.elastic and task.is_alone:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: there is one worker. Name all in --worker_hosts, TF_CONFIG or Slurm."
        )
    sizes = rules.parse_elastic(config.elastic) if config.elastic else None
    policy = Policy(config.worker_timeout_secs, config.start_timeout_secs, config.wait_for_workers, sizes)
    return join(task, devices.place(config, local=task.local), policy, leave_at_once)


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


def announce(start: Start, membership: Membership, has_hooks: bool) -> Start:
    """Agrees on the steps with the other workers, for whom it may build the graph again, and prints the first lines.

    After a comparison of towers it builds it again for hooks, which may fetch what the network keeps of its last call.

    The chief also removes what interrupted writes left, and writes run.json.
    """
    is_over, built_for = start.is_chief and start.evaluations.best.is_over, membership.devices
    steps_done, end = membership.agree(
        lambda: manifest.same_everywhere(start.run_json, start.workload),
        start.steps_done,
        start.steps_done if is_over else start.last_step,
    )
    if membership.devices != built_for:
        start = rebuilt(start, membership)
    is_new = not steps_done or (start.has_other_towers and not start.config.elastic)
    stateful = start.graph.random_numbers.stateful
    if is_new and towers.is_due(start.config, start.run_json["config"]["workload"], stateful):
        start = with_towers_compared(start)
        start = rebuilt(start, membership) if has_hooks else start
    if start.is_chief:
        checkpoint.remove_leftovers(start.run_dir.path)
        start.run_dir.cut_metrics(steps_done)
        start.run_dir.write(directory.RUN, start.run_json)
        each = start.graph.layout.towers_per_worker
        lines = messages.opening_lines(start.run_json, str(start.run_dir.path), steps_done, start.last_step, each)
    else:
        lines = [messages.joining_line(membership.task, steps_done, end, membership.devices.names)]
    say(*lines, *start.notes)
    return dataclasses.replace(start, steps_done=steps_done, end=end)


def run(start: Start, user_hooks: UserHooks, received: signals.Received, membership: Membership) -> Result:
    """Opens the session, does the steps and saves."""
    began, graph, failure, running = time.perf_counter(), start.graph, None, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(graph.graph.as_default())
        stack.callback(user_hooks.close)
        user_hooks.extend_graph()
        # A step with an all-reduce may have to be ended.
        note_stall = membership.note_stall if graph.layout.num_replicas > 1 else lambda what, seconds: None
        watchdog = stack.enter_context(StepWatchdog(start.config.stall_timeout_secs, graph.progress, note_stall))
        sizes = graph.layout.tower_batch, start.config.accumulate_steps
        shortages.check_tensors(graph.graph, *sizes)
        with (
            shortages.named(*sizes),
            membership.failures_named(),
            step_failures.named(
                graph.examples.name, start.workload.name, batch=lambda: running and running.next_batch()
            ),
            sessions.open_session(graph, membership, start.last_step, start.restore) as session,
        ):
            watchdog.session = session
            user_hooks.session_created(session)
            running = Running(start, session, membership, received, user_hooks, watchdog, start.steps_done)
            try:
                do_steps(running, actions_of(running, stack))
            except (errors.NonFiniteError, errors.MirrorError) as error:
                failure = error
    return running.result(time.perf_counter() - began, failure)


def actions_of(running: Running, stack: contextlib.ExitStack) -> list[actions.Action]:
    """Makes the actions that may be due after a step, in their order; what they open is closed with the stack."""
    return [
        nonfinite.Guard(running),  # so early, as a step that ends the run is neither logged nor saved
        actions.MirrorCheck(running),
        *([actions.ChooseExamples(running)] if running.start.graph.choice else []),  # before it is saved
        *(_chiefs_actions(running, stack) if running.start.is_chief else [saving.SendPosition(running)]),
        running.user_hooks,
        actions.Stop(running),
    ]


def _chiefs_actions(running: Running, stack: contextlib.ExitStack) -> list[actions.Action]:
    """Makes the actions that write files."""
    start = running.start
    bar = stack.enter_context(messages.progress_bar(start.steps_done, start.last_step))
    metrics = logs.MetricsFile(start.run_dir.path / directory.METRICS)
    writer = stack.enter_context(contextlib.closing(logs.EventWriter(start.run_dir.path)))
    # TensorBoard then drops what an interrupted start logged from this step on.
    writer.add(start.steps_done + 1, session_log=v1.SessionLog(status=v1.SessionLog.START))
    if not start.steps_done:
        writer.add(0, graph_def=summaries.serialized_graph(start.graph.graph))
    if start.sheet:
        logs.add_image(writer, "examples", start.sheet)
        start.run_dir.write_image(directory.SHEET, start.sheet)
    return [
        actions.Log(running, bar, metrics, writer),
        stack.enter_context(contextlib.closing(actions.Profile(running))),
        saving.Saver(running, metrics, writer),
    ]


def do_steps(running: Running, due_actions: Sequence[actions.Action]) -> None:
    """Does the steps, each of them followed by the actions that are due."""
    start = running.start
    one_step = sessions.one_step(
        running.session, start.graph, running.user_hooks, start.is_summarized, running.watchdog
    )
    for action in due_actions:
        action.begin()
    running.begin()
    for step in range(start.steps_done + 1, start.end + 1):
        if running.is_over:
            break
        report = one_step(step)
        running.count(report)
        for action in due_actions:
            if action.is_due(step):
                action(step, report)
    for action in due_actions:
        action.end(running.step)


def conclude(start: Start, result: Result, membership: Membership) -> Result:
    """Writes the result, prints the last lines and leaves together with the other workers."""
    failure = result.failure
    if start.is_chief and result.reason is StopReason.RESIZED:
        failure = None  # a save that failed costs the steps since the one before
    elif start.is_chief:
        failure = results.write(start.run_dir, result, start.evaluations.as_results)
        if not failure or isinstance(failure, errors.SaveError | errors.EvaluationError):
            path = start.run_json["config"]["workload"]
            say(*messages.closing_lines(result, start.last_step, path, start.evaluations))
    if failure:
        raise failure
    known = None if result.reason is StopReason.ANOTHER_WORKER else result.reason.value
    return dataclasses.replace(result, reason=StopReason(membership.leave(known) or StopReason.ANOTHER_WORKER))
