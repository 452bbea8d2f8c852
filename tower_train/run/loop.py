"""train: from a workload and a config to a trained network in a train_dir."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import member
from tower_train.cluster import task as cluster
from tower_train.config import Config
from tower_train.graph import devices, training
from tower_train.inference import evaluate_run
from tower_train.run import bad_batch, data_check, dtypes, follower, input_stream, report, signals
from tower_train.run.results import Result
from tower_train.run.steps import Start, do_steps
from tower_train.run_dir import checkpoint, directory, manifest, recovery
from tower_train.workload import DataRequest, Workload, load

v1 = tf.compat.v1


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
      WorkerError: a worker is missing; with wait_for_workers too, as only `python -m tower_train` starts itself again.
      UserError: something else that the user can mend; the message says how.
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
        return dataclasses.replace(result, stopped_by=me.leave(result.stopped_by))


def _train(path: str | None, workload: Workload, config: Config, placed, session_hooks, me=None) -> Result:
    """Trains by itself, or as the chief of several workers, as whom `me` stands."""
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with run_dir.locked(), signals.survived(signals.SAVING):
        before = run_dir.read(directory.RUN)
        config, notes = dtypes.resolve(config, before)
        # What `auto` chose at the first start is what the run stays with.
        dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
        examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
        input_stream.check_options(examples, config)
        built = training.training_graph(workload, examples, config, me.placed if me else placed)
        now = manifest.describe(workload, path, examples, config, placed, built.num_parameters)
        notes += run_dir.warnings() + manifest.check_resume(
            run_dir.path, before, now, config.override, workload.options
        )
        dump = functools.partial(bad_batch.write, run_dir.path, workload, examples, config)
        run = _prepare(config, placed, built, run_dir, notes, bool(before), dump if config.dump_bad_batch else None)
        if config.check_data and not run.restored:
            notes += data_check.warnings(workload, examples)
        evaluations = evaluate_run.DuringTraining(workload, config, placed, examples, run_dir)
        evaluations.best.begin(run.first_step)
        if me:
            last_step = run.first_step if evaluations.best.is_over else run.last_step
            me.meet(manifest.same_everywhere(now, workload), run.first_step, last_step)
        recovery.remove_leftovers(run_dir.path)
        run_dir.cut_metrics(run.first_step)
        run_dir.write(directory.RUN, now)
        report.print_lines(report.opening_lines(now, str(run_dir.path), run.first_step, run.last_step) + notes)
        result, failure = do_steps(run, evaluations, session_hooks, me)
        result = dataclasses.replace(result, data=examples.name, notice=examples.notice)
        try:
            # A start that did no step leaves the result of the one that did.
            if result.loss is not None or run_dir.read(directory.RESULT).get("step") != result.step:
                run_dir.update(directory.RESULT, dataclasses.asdict(result) | evaluations.results())
            elif changed := evaluations.results() | ({"stopped_by": result.stopped_by} if failure else {}):
                run_dir.update(directory.RESULT, changed)
        except errors.RunError as error:
            failure = failure or errors.SaveError(
                f"training ended at step {result.step}, but {str(error).rstrip('.')}. The same command goes on."
            )
        if not failure or isinstance(failure, errors.SaveError):
            lines = report.closing_lines(result, run.last_step, path is not None, evaluations.last)
            report.print_lines(lines)
        if failure:
            raise failure
        return result


def _prepare(config, placed, built, run_dir, notes: list[str], is_known: bool, dump) -> Start:
    """Finds the checkpoint to begin at; adds to notes what it does not hold, and which were damaged."""
    last_step = config.last_step(built.num_examples)
    with built.graph.as_default():
        checkpoints = checkpoint.Checkpoints(run_dir.path, built.variables, config.keep_checkpoints)
        newest = checkpoint.latest(run_dir.path)
        if not newest:
            return Start(config, placed, built, run_dir, checkpoints, None, 0, last_step, dump)
        if not is_known and not config.override:
            raise errors.RunError(
                f"--train_dir={run_dir.path} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of "
                "this program. Give another directory, or --override to start from that checkpoint."
            )
        newest, damaged = recovery.newest_intact(run_dir.path)
        notes += damaged
        fresh = checkpoints.plan_restore(newest, config.override)
        notes += [f"Not in {newest}, initialised afresh: {', '.join(fresh)}."] if fresh else []
        return Start(config, placed, built, run_dir, checkpoints, newest, checkpoint.step_of(newest), last_step, dump)
