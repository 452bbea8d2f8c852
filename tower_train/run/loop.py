"""train: from a workload and a config to a trained network in a train_dir."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.config import Config
from tower_train.graph import build, devices
from tower_train.run import checkpoint, directory, evaluate_run, hooks, manifest, report, signals
from tower_train.workload import DataRequest, Workload, load

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of a run; also what result.json holds, beside the last evaluation.

    Attributes:
      train_dir: where the run is.
      step: the last step, over all starts.
      loss: at that step; None where this start did no step.
      examples_per_sec: over this start's steps after its first; None where there were none.
      seconds: this start took, from opening the session to the last save.
      stopped_by: 'last step', 'SIGINT' or 'SIGTERM'; in result.json also the message of a NonFiniteError.
      checkpoint: path of the newest checkpoint.
      data: what was trained on.
      notice: what the user must know of the data, or None.
    """

    train_dir: str
    step: int
    loss: float | None
    examples_per_sec: float | None
    seconds: float
    stopped_by: str
    checkpoint: str | None
    data: str = ""
    notice: str | None = None


@dataclasses.dataclass(frozen=True)
class _Run:
    """One start of a run, ready to do its steps from first_step to last_step.

    Attributes:
      restored: path of the checkpoint it begins at; None at step 0.
    """

    config: Config
    placed: devices.Devices
    built: build.TrainingGraph
    run_dir: directory.RunDirectory
    checkpoints: checkpoint.Checkpoints
    restored: str | None
    first_step: int
    last_step: int


def train(workload: Workload | str, config: Config, session_hooks: Sequence[v1.train.SessionRunHook] = ()) -> Result:
    """Trains, or goes on training, in config.train_dir.

    Args:
      workload: what to train: a record, or its import path.
      config: everything else.
      session_hooks: further hooks around each step.

    Raises:
      UserError: something the user can mend; the message says how.
    """
    path, workload = (workload, load(workload)) if isinstance(workload, str) else (None, workload)
    placed = devices.place(config)
    run_dir = directory.RunDirectory(config.train_dir or f"runs/{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with run_dir.locked():
        before = run_dir.read(directory.RUN)
        # What `auto` chose at the first start is what the run stays with.
        dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
        examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
        built = build.training_graph(workload, examples, config, placed)
        now = manifest.describe(workload, path, examples, config, placed, built.num_parameters)
        notes = manifest.check_resume(run_dir.path, before, now, config.override)
        run = _prepare(config, placed, built, run_dir, notes, is_known=bool(before))
        run_dir.cut_metrics(run.first_step)
        run_dir.write(directory.RUN, now)
        report.print_lines(report.opening_lines(now, str(run_dir.path), run.first_step, run.last_step) + notes)
        evaluations = evaluate_run.DuringTraining(workload, config, placed, examples.dataset, run_dir)
        try:
            result = _do_steps(run, evaluations, session_hooks)
        except errors.NonFiniteError as error:
            run_dir.update(directory.RESULT, {"stopped_by": str(error)})
            raise
        result = dataclasses.replace(result, data=examples.name, notice=examples.notice)
        found = {"evaluation": evaluations.last.as_dict()} if evaluations.last else {}
        run_dir.update(directory.RESULT, dataclasses.asdict(result) | found)
        report.print_lines(report.closing_lines(result, run.last_step, path is not None))
        return result


def _prepare(config, placed, built, run_dir, notes: list[str], is_known: bool) -> _Run:
    """Finds the checkpoint to begin at; adds to notes what it does not hold."""
    last_step = config.last_step(built.num_examples)
    with built.graph.as_default():
        checkpoints = checkpoint.Checkpoints(run_dir.path, built.variables, config.keep_checkpoints)
        newest = checkpoint.latest(run_dir.path)
        if not newest:
            return _Run(config, placed, built, run_dir, checkpoints, None, 0, last_step)
        if not is_known and not config.override:
            raise errors.RunError(
                f"--train_dir={run_dir.path} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of "
                "this program. Give another directory, or --override to start from that checkpoint."
            )
        fresh = checkpoints.plan_restore(newest, config.override)
        notes += [f"Not in {newest}, initialised afresh: {', '.join(fresh)}."] if fresh else []
        return _Run(config, placed, built, run_dir, checkpoints, newest, checkpoint.step_of(newest), last_step)


def _do_steps(run: _Run, evaluations: evaluate_run.DuringTraining, session_hooks) -> Result:
    """Opens the session, does the steps, saves."""
    began = time.perf_counter()
    clock = hooks.TrainingClock()
    last = hooks.LastValues(run.built, clock)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.built.graph.as_default())
        signal_received = stack.enter_context(signals.noted())
        console = stack.enter_context(report.Console(run.first_step, run.last_step))
        writer = stack.enter_context(contextlib.closing(v1.summary.FileWriter(str(run.run_dir.path))))
        stack.enter_context(contextlib.closing(evaluations))
        if run.restored:  # TensorBoard then drops what an interrupted start logged of later steps
            writer.add_session_log(v1.SessionLog(status=v1.SessionLog.START), run.first_step)

        def evaluate(path: str) -> None:
            with clock.stopped():
                for line in report.evaluation_lines(evaluations.evaluate(path)):
                    console.line(line)

        log = hooks.LogHook(
            run.built, run.config.log_every_steps, clock, console, run.run_dir.path / directory.METRICS, writer
        )
        all_hooks = [last, *_hooks(run, log, writer, evaluate, signal_received), *session_hooks]
        with v1.train.MonitoredSession(_session_creator(run), all_hooks) as session:
            while run.first_step < run.last_step and not session.should_stop():
                session.run(run.built.train_op)
    stopped_by = signal_received()
    return Result(
        train_dir=str(run.run_dir.path),
        step=last.step or run.first_step,
        loss=last.loss,
        examples_per_sec=last.steps_per_sec and last.steps_per_sec * run.built.global_batch,
        seconds=time.perf_counter() - began,
        stopped_by=stopped_by.name if stopped_by else "last step",
        checkpoint=checkpoint.latest(run.run_dir.path),
    )


def _hooks(run: _Run, log: hooks.LogHook, writer, evaluate, signal_received) -> list[v1.train.SessionRunHook]:
    """In the order in which they look at a step: nothing is logged or saved of one that is not finite."""
    built, config = run.built, run.config
    found = [hooks.NonFiniteGuard(built), log]
    if config.summary_every_steps:
        found.append(hooks.SummaryHook(built, config.summary_every_steps, writer))
    found.append(
        hooks.CheckpointHook(built, run.checkpoints, config.save_every_steps, config.eval_every_steps, evaluate)
    )
    return found + [hooks.StopHook(built, run.last_step, signal_received)]


def _session_creator(run: _Run) -> v1.train.SessionCreator:
    scaffold = v1.train.Scaffold(
        init_op=v1.global_variables_initializer(),
        init_fn=(lambda _, session: run.checkpoints.restore(session, run.restored)) if run.restored else None,
        # Runs after the restore, so that the stream starts at the restored position.
        local_init_op=tf.group(v1.local_variables_initializer(), v1.tables_initializer(), run.built.stream_initializer),
    )
    return v1.train.ChiefSessionCreator(scaffold, config=run.placed.session_config)
