"""One start of a run, the same path in every worker: plan, build, open, steps."""

import atexit
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tower_train import errors
from tower_train.cluster.agreement import RunOver
from tower_train.cluster.membership import Membership, join
from tower_train.cluster.task import Policy, Task, find_task
from tower_train.config import Config
from tower_train.console import say
from tower_train.graph import devices
from tower_train.graph.record import StepReport
from tower_train.options import rules
from tower_train.run import messages, results, signals
from tower_train.run.opening import open_training
from tower_train.run.plan import make_plan
from tower_train.run.results import Result, StopReason
from tower_train.run.training import Training, UserFunctions
from tower_train.run_dir import directory
from tower_train.workload import Workload, load


def train(
    workload: Workload | str,
    config: Config,
    workload_options: Mapping[str, Any] | None = None,
    after_step: Callable[[int, StepReport], bool | None] | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    on_evaluate: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Trains, or resumes training, in config.train_dir.

    Args:
      workload: a record, or its import path.
      config: the trainer's options.
      workload_options: values of the workload's own options, by name.
      after_step: called after each step with its number and its report, such as report.loss, in numpy values; the run
        ends if it returns True.
      on_log, on_evaluate: called in the chief with each record of metrics.jsonl: of the training (step, epoch, loss,
        ...), and of an evaluation (step, epoch, val_loss, and metrics whose names begin with val_ or train_).

    Raises:
      WorkerError: a worker is missing; also with wait_for_workers or elastic, as only `python -m tower_train` restarts
        itself. With elastic also: the run goes on with another number of workers.
      UserError: another error that the user can correct; the message says how.
    """
    functions = UserFunctions(after_step, on_log, on_evaluate)
    return drain(start(workload, config, functions, workload_options or {}))


def training_steps(
    workload: Workload | str, config: Config, workload_options: Mapping[str, Any] | None = None
) -> Iterator[StepReport]:
    """Trains as `train`, one step for each next(), so that the program has the loop.

        for report in tower_train.training_steps(workload, config):
            if report.loss < 0.1:
                break

    Each step is followed by all that a run has: log lines, checkpoints, evaluations. Leaving the loop early saves and
    ends the run, as a signal does. Arguments and errors as for `train`; a report is as after_step gets it.
    """
    steps = start(workload, config, UserFunctions(), workload_options or {})
    atexit.register(steps.close)  # for a program that ends in between: later Python lacks what saves the run
    try:
        yield from steps
    finally:
        atexit.unregister(steps.close)


def drain(steps: Iterator[StepReport]) -> Result:
    """Does all steps of `start`; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def start(
    workload: Workload | str,
    config: Config,
    user: UserFunctions,
    workload_options: Mapping[str, Any],
    leave_at_once: Callable[[errors.WorkerError], None] | None = None,
) -> Iterator[StepReport]:
    """Yields the reports of a start's steps; the generator's value is the Result.

    Args:
      workload, config, workload_options: as for `train`.
      user: after steps, log lines and evaluations.
      leave_at_once: ends the process for a missing worker if its step cannot be ended; None: the main thread gets an
        exception, once it is in Python.
    """
    path, workload, config, task = _resolved(workload, config, workload_options)
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir.check_links()  # before anything takes time, and before anything is written
    devices.refuse_auto_jit()
    devices.choose_kernels(config.deterministic, config.tensor_float_32)
    received, failure = signals.Received(), None  # a step's failure; the result tells what was saved

    def leave(error: errors.WorkerError) -> None:
        (leave_at_once or received.raise_in_main)(_for_this_worker(error, received))

    with _join(task, config, leave) as membership, run_dir.locked() if task.is_chief else contextlib.nullcontext():
        try:
            plan = make_plan(path, workload, config, run_dir, membership)
        except RunOver as over:
            return Result("", over.step, None, None, 0.0, StopReason(over.stopped_by), None)
        with received.handled():  # only now: until there is a plan, a signal ends the process as usual
            try:
                with open_training(plan, membership, received, user) as training:
                    try:
                        yield from training.steps()
                    except (errors.NonFiniteError, errors.MirrorError) as error:
                        failure = error
                    except GeneratorExit:  # left early: `steps` has ended the run, which still gets its result
                        pass
                result = conclude(training, training.result(failure))
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
    # as if TF_CONFIG's or Slurm's hosts were given, so that all later code looks in one place
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


def _for_this_worker(error: errors.WorkerError, received: signals.Received) -> errors.WorkerError:
    """Returns an error after which a worker that was told to end is not restarted."""
    if not received.stopping or error.exit_status != errors.WorkerError.exit_status:
        return error
    return errors.WorkerError(str(error), 128 + received.stopping, error.is_final, error.environment)


def conclude(training: Training, result: Result) -> Result:
    """Writes the result, prints the last lines and leaves together with the other workers."""
    plan, evaluations, failure = training.plan, training.evaluations, result.failure
    if plan.is_chief and result.reason is StopReason.RESIZED:
        failure = None  # a save that failed costs the steps since the one before
    elif plan.is_chief:
        failure = results.write(plan.run_dir, plan.run_json["started"], result, evaluations.last)
        if not failure or isinstance(failure, errors.SaveError | errors.EvaluationError):
            path = plan.run_json["config"]["workload"]
            say(*messages.closing_lines(result, plan.last_step, path, evaluations))
    if failure:
        raise failure  # the others learn of it from Membership.__exit__
    known = None if result.reason is StopReason.ANOTHER_WORKER else result.reason.value
    reason = StopReason(training.membership.leave(known) or StopReason.ANOTHER_WORKER)
    if reason is StopReason.ANOTHER_WORKER:  # which has asked all to stop, and died before it said why
        raise errors.WorkerError(
            f"A worker has ended the run at step {result.step} of {plan.last_step}, and is lost. Saved: start all "
            "again, with the same command."
        )
    return dataclasses.replace(result, reason=reason)
