"""Lines for people about a run: first lines, step lines, last lines with the next commands, and the progress bar."""

import datetime
import os
import pathlib
import shlex
import shutil
import sys

from tower_train.cluster.task import Task
from tower_train.options import rules
from tower_train.run.evaluations import Evaluations
from tower_train.run.plan import Plan
from tower_train.run.results import Result, StopReason
from tower_train.workload import Workload

# Shares of waiting from which input is slow, on GPUs, and on CPUs where it takes its time from the cores that train.
_SLOW_INPUT = {True: 0.05, False: 0.3}


def opening_lines(plan: Plan) -> list[str]:
    """Returns the first lines of a run."""
    config, data, versions, devices = plan.config, plan.run_json["data"], plan.run_json["versions"], plan.devices.names
    batch, towers, workers = config.global_batch, len(devices), config.num_workers
    aside, steps_done, last_step = config.validation_fraction, plan.steps_done, plan.last_step
    lines = [
        f"tower_train {versions['tower_train']} on TensorFlow {versions['tensorflow']}",
        f"data:     {data['name']}, {data['num_examples']} examples"
        + (f" after --validation_fraction={aside:g} was set aside" if aside else ""),
        f"towers:   {towers}, on {', '.join(devices)}" + ("" if plan.devices.gpus else " (no GPU is used)"),
        f"batch:    {batch} examples a step ({towers} x {batch // towers // workers}"
        + (f" on each of {workers} workers)" if workers > 1 else ")"),
        f"network:  {plan.run_json['num_parameters']:,} parameters, {config.dtype}; {config.optimizer}, "
        f"learning rate {config.learning_rate:g}",
        f"steps:    {steps_done} to {last_step} ({last_step * batch / data['num_examples']:.1f} epochs)",
        f"run:      {plan.run_dir.path}" + (f" (resumed at step {steps_done})" if steps_done else ""),
    ]
    if batch > data["num_examples"]:  # it trains, but is hardly meant
        lines.append(
            f"*** A step takes {batch} examples, and there are {data['num_examples']}: some come several times in it. "
            f"Give --global_batch_size={data['num_examples']} or less."
        )
    if config.elastic:
        (least, _), batches = rules.parse_elastic(config.elastic), plan.step.layout.towers_per_worker
        share = f"which take {' + '.join(map(str, batches))} batches a step"
        lines.append(f"elastic:  {len(batches)} of {least} to {workers} workers, {share}")
    if data["notice"]:
        lines += ["*" * 100, f"*** {data['notice']}", "*" * 100]
    return lines


def joining_line(plan: Plan, task: Task) -> str:
    """Returns the first line of a worker that is not the chief."""
    return (
        f"{task.name(task.index)} of {len(task.hosts)} trains with {task.name(0)}, steps {plan.steps_done} to "
        f"{plan.end}, on {', '.join(plan.devices.names)}"
    )


def closing_lines(result: Result, last_step: int, path: str | None, evaluations: Evaluations) -> list[str]:
    """Returns the last lines of a run: its result and the next commands. path: the workload's import path or None."""
    has_no_gain = result.reason is StopReason.NO_GAIN
    is_done = has_no_gain or result.reason is StopReason.LAST_STEP
    if is_done and result.training_secs is None:
        option = "--early_stopping_patience_epochs" if has_no_gain else "--max_steps or --epochs"
        lines = [f"Step {result.step} was reached before; nothing to do. A larger {option} trains on."]
    else:
        rate = f", {result.examples_per_sec:.1f} examples/sec" if result.examples_per_sec else ""
        ended = "Done" if result.reason is StopReason.LAST_STEP else f"Stopped by {result.stopped_by}"
        lines = [
            f"{ended} at step {result.step} of {last_step} after {result.seconds:.1f} s: "
            f"{'no update' if result.loss is None else f'loss {as_loss(result.loss)}'}{rate}.",
            f"Saved:    {result.checkpoint or 'no checkpoint'}",
        ]
    lines += evaluations.closing_lines(result.step, result.training_secs)
    if result.notice:
        lines.append(f"*** {result.notice}")
    if not is_done:  # else the same command has nothing left to do
        lines.append("Resume:   the same command with --train_dir=" + shlex.quote(result.train_dir))
    if result.checkpoint:
        lines.append(f"Evaluate: {_evaluate_command(result.train_dir, path, evaluations.best.is_kept)}")
    here = shlex.quote(result.train_dir)
    return [
        *lines,
        f"Curves:   {python()} -m tower_train.curves {here}",
        f"     or:  {python()} -m tensorboard.main --logdir={here}",
    ]


def step_line(
    step: int,
    loss: float,
    examples_per_sec: float,
    sec_per_batch: float,
    input_share: float = 0.0,
    on_gpus: bool = False,
) -> str:
    """Formats the original's log line. sec_per_batch: seconds per tower batch, over all towers; input_share: share of
    the time that steps waited for input, which is shown if it is large."""
    waited = f"; input {100 * input_share:.0f} %" if input_share >= _SLOW_INPUT[on_gpus] else ""
    return (
        f"{datetime.datetime.now()}: step {step}, loss = {as_loss(loss)} "
        f"({examples_per_sec:.1f} examples/sec; {sec_per_batch:.3f} sec/batch{waited})"
    )


def as_loss(loss: float) -> str:
    """Formats a loss with two decimals, as the original, but below 1 with three significant digits."""
    # with two decimals a loss that falls from 0.014 to 0.006 would seem to stand still
    return f"{loss:.2f}" if loss == 0 or not abs(loss) < 1 else f"{loss:#.3g}"


def _evaluate_command(train_dir: str, path: str | None, best: bool) -> str:
    """Returns the command that evaluates a run. best: the best weights."""
    if not path:
        options = f"train_dir={train_dir!r}{', best=True' if best else ''}"
        return f"tower_train.evaluate_run(tower_train.EvaluateOptions({options}), workload), in Python"
    options = f"--train_dir={shlex.quote(train_dir)}{' --best' if best else ''}"
    return f"{python()} -m tower_train.evaluate {options}"


def python() -> str:
    """Returns the command of this Python, as `python` may be another installation, without this package."""
    found = shutil.which("python")
    if found and os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(sys.executable)):
        return "python"
    return shlex.quote(sys.executable)


def import_path(workload: Workload) -> str | None:
    """Returns the path by which workload.load finds this very record: 'module' (its WORKLOAD) or 'module:NAME'; None if
    it is in no module, or importing the running program would run it."""
    main = sys.modules["__main__"]
    # the program last: a module that it imports may have the record too, and is safer to import
    for module_name, module in sorted(sys.modules.items(), key=lambda item: item[1] is main):
        names = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is workload]
        if names:
            name = _main_name() if module is main else module_name
            return name and (name if "WORKLOAD" in names else f"{name}:{names[0]}")
    return None


def _main_name() -> str | None:
    """Returns the name under which the program can be imported without running it; None if there is none."""
    main = sys.modules["__main__"]
    if main.__spec__:  # python -m
        return main.__spec__.name
    try:
        path = pathlib.Path(main.__file__)
        is_guarded = "__main__" in path.read_text()
    except (AttributeError, OSError, UnicodeDecodeError):
        return None
    return path.stem if path.suffix == ".py" and path.stem.isidentifier() and is_guarded else None
