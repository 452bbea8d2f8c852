"""What a person reads of a run: its first lines, a line every few steps, its last lines, and the progress bar."""

import contextlib
import datetime
import importlib.util
import os
import shlex
import shutil
import sys


class Console:
    """Lines on standard output; on a terminal a progress bar stands under them.

    Use as a context manager.
    """

    def __init__(self, first_step: int, last_step: int):
        """Args: the steps the bar runs from and to."""
        self._bar = self._task = None
        if sys.stdout.isatty():
            from rich import progress  # comes with Keras, hence with TensorFlow

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                progress.BarColumn(),
                progress.TextColumn("loss {task.fields[loss]}  {task.fields[rate]} examples/sec"),
                progress.TimeRemainingColumn(),
                transient=True,
            )
            self._task = self._bar.add_task("", total=last_step, completed=first_step, loss="-", rate="-")

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def advance(self, step: int, **fields: str) -> None:
        """Moves the bar; fields are loss and rate."""
        if self._bar:
            self._bar.update(self._task, completed=step, **fields)

    def line(self, text: str) -> None:
        """Prints one line, above the bar where there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print_lines([text])


def print_lines(lines: list[str]) -> None:
    """Prints lines where there is no bar yet, or no longer.

    Standard output may be a file on a full disk, or a pipe that nobody reads any more: no reason to end a run.
    """
    with contextlib.suppress(OSError):
        print("\n".join(lines), flush=True)


def opening_lines(run_json: dict, train_dir: str, first_step: int, last_step: int) -> list[str]:
    """What is about to happen, from the content of run.json."""
    data, config, devices = run_json["data"], run_json["config"], run_json["devices"]
    batch, towers = run_json["global_batch"], len(devices)
    on_cpu = not devices[0].startswith("GPU")
    versions, workers = run_json["versions"], len((config["worker_hosts"] or "").split(","))
    lines = [
        f"tower_train {versions['tower_train']} on TensorFlow {versions['tensorflow']}",
        f"data:     {data['name']}, {data['num_examples']} examples",
        f"towers:   {towers}, on {', '.join(devices)}" + (" (no GPU is used)" if on_cpu else ""),
        f"batch:    {batch} examples a step ({towers} x {batch // towers // workers}"
        + (f" on each of {workers} workers)" if workers > 1 else ")"),
        f"network:  {run_json['num_parameters']:,} parameters, {config['dtype']}; {config['optimizer']}, "
        f"learning rate {config['learning_rate']:g}",
        f"steps:    {first_step} to {last_step} ({last_step * batch / data['num_examples']:.1f} epochs)",
        f"run:      {train_dir}" + (f" (resumed at step {first_step})" if first_step else ""),
    ]
    if data["notice"]:
        lines += ["*" * 100, f"*** {data['notice']}", "*" * 100]
    return lines


def closing_lines(result, last_step: int, importable: bool, evaluation=None) -> list[str]:
    """What came out, from a `results.Result`, and what to do next.

    Args:
      last_step: the one to stop at.
      importable: whether run.json names the workload.
      evaluation: the last `evaluation.Evaluation`, or None.
    """
    has_no_gain = result.stopped_by.startswith("no gain")
    if result.loss is None:
        option = "--stop_after_no_gain_epochs" if has_no_gain else "--max_steps or --epochs"
        lines = [f"Step {result.step} was reached before; nothing to do. A greater {option} trains on."]
    else:
        rate = f", {result.examples_per_sec:.1f} examples/sec" if result.examples_per_sec else ""
        lines = [
            f"Stopped by {result.stopped_by} at step {result.step} of {last_step} after {result.seconds:.1f} s: "
            f"loss {result.loss:.2f}{rate}.",
            f"Saved:    {result.checkpoint}",
        ]
    if evaluation and evaluation.step == result.step:
        name, metric = next(iter(evaluation.metrics.items()))
        trained = f", after {result.training_secs:.1f} s of training" if result.training_secs else ""
        lines.append(f"Result:   {_with_interval(name, metric)}{trained}")
    if result.notice:
        lines.append(f"*** {result.notice}")
    if result.step < last_step and not has_no_gain:
        lines.append("Resume:   the same command with --train_dir=" + shlex.quote(result.train_dir))
    return lines + _next_commands(result.train_dir, importable)


def step_line(step: int, loss: float, examples_per_sec: float, sec_per_batch: float) -> str:
    """The original's log line. sec_per_batch: seconds a tower batch took, over all towers."""
    return (
        f"{datetime.datetime.now()}: step {step}, loss = {loss:.2f} "
        f"({examples_per_sec:.1f} examples/sec; {sec_per_batch:.3f} sec/batch)"
    )


def evaluation_lines(evaluation) -> list[str]:
    """The metrics of an `evaluation.Evaluation`, each with its 95 % interval."""
    about = f"{evaluation.data}, {evaluation.weights}{', several views of each' if evaluation.several_views else ''}"
    lines = [f"step {evaluation.step}: {evaluation.num_examples} examples of {about}"]
    return lines + [_with_interval(name, metric) for name, metric in evaluation.metrics.items()]


def _with_interval(name: str, metric) -> str:
    interval = "" if metric.low is None else f" (95 % interval {metric.low:.3f} to {metric.high:.3f})"
    return f"{name} = {metric.mean:.3f}{interval}"


def comparison_lines(on_training, evaluation) -> list[str]:
    """The metrics on training examples beside those of an `evaluation.Evaluation`, in one line."""
    compared = []
    for name, metric in on_training.metrics.items():
        above = metric.mean - evaluation.metrics[name].mean
        compared.append(f"{name} = {metric.mean:.3f} ({abs(above):.3f} {'above' if above >= 0 else 'below'})")
    return [f"on {on_training.num_examples} training examples: {', '.join(compared)}"]


def overfitting(on_training, evaluation) -> str | None:
    """A warning where the first metric is much better on training examples, beyond what chance explains: its 95 %
    intervals do not touch, and it is more than 0.1 better."""
    name = next(iter(on_training.metrics))
    seen, unseen = on_training.metrics[name], evaluation.metrics[name]
    if seen.low is None or unseen.high is None or seen.low <= unseen.high or seen.mean - unseen.mean <= 0.1:
        return None
    return (
        f"*** {name} is {seen.mean:.3f} on training examples and {unseen.mean:.3f} on the test examples: the network "
        "learns its examples by heart. Fewer epochs (--stop_after_no_gain_epochs, --keep_best), weight decay, "
        "distortions or more data help."
    )


def confusion_lines(matrix: list[list[int]], class_names: tuple[str, ...]) -> list[str]:
    """A confusion matrix as a table: a row a true class, a column a predicted one."""
    width = max(5, max(len(str(count)) for row in matrix for count in row) + 1)
    label = max(len(name) for name in class_names)
    head = " " * label + "".join(name[: width - 1].rjust(width) for name in class_names)
    rows = [
        name.rjust(label) + "".join(str(count).rjust(width) for count in row)
        for name, row in zip(class_names, matrix, strict=True)
    ]
    return ["confusion matrix (row: true class, column: predicted class)", head, *rows]


def _next_commands(train_dir: str, importable: bool) -> list[str]:
    """What to do after training, as commands that work in this shell."""
    here, workload = shlex.quote(train_dir), "" if importable else " --workload=MODULE:NAME"
    boards = shutil.which("tensorboard") or importlib.util.find_spec("tensorboard")
    install = "" if boards else f"   (after: {_python()} -m pip install tensorboard)"
    return [
        f"Evaluate: {_python()} -m tower_train.evaluate --train_dir={here}{workload}",
        f"Curves:   {_python()} -m tensorboard.main --logdir={here}{install}",
    ]


def _python() -> str:
    found = shutil.which("python")
    if found and os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(sys.executable)):
        return "python"
    return shlex.quote(sys.executable)
