"""Preparing a start of a run: examples, graph and, in the chief, the checkpoint to begin at."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable

import tensorflow as tf

from tower_train.cluster.membership import Membership
from tower_train.config import Config
from tower_train.graph import devices, summaries
from tower_train.graph.record import TrainingGraph
from tower_train.graph.training import training_graph
from tower_train.inference.evaluator import Evaluator
from tower_train.run import (
    choices,
    data_check,
    input_stream,
    profile,
    report,
    resume,
)
from tower_train.run.evaluations import TEST, TRAIN, Evaluations
from tower_train.run_dir import best, directory, manifest
from tower_train.workload import DataRequest, Examples, Workload


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run in one worker, ready for its steps.

    Its config has the final dtype, place of the variables and workers. Other workers than the chief learn
    `steps_done`, the number of earlier steps, and `has_steps` when the start is announced. Only the chief has
    `resumed`, the checkpoint to begin at, `evaluations`, and the graph's `drawing` if the event files lack it.
    """

    config: Config
    workload: Workload
    examples: Examples
    graph: TrainingGraph
    run_dir: directory.RunDirectory
    run_json: dict
    notes: list[str]
    last_step: int
    steps_done: int = 0
    has_steps: bool = True
    resumed: resume.ResumePoint | None = None
    evaluations: Evaluations | None = None
    drawing: bytes | None = None

    @property
    def is_chief(self) -> bool:
        return self.resumed is not None

    @property
    def restore(self) -> Callable[[tf.compat.v1.Session], None] | None:
        """Sets all variables from a checkpoint, in the chief; None for initial values."""
        return self.resumed.restore if self.resumed else None


def prepare(
    path: str | None, workload: Workload, config: Config, run_dir: directory.RunDirectory, membership: Membership,
    stack: contextlib.ExitStack,
) -> Start:  # fmt: skip
    """Loads the examples, builds the graph and, in the chief, finds the checkpoint to begin at.

    The sessions of the start's evaluations are closed with the stack.
    """
    before = run_dir.read(directory.RUN)
    placed = membership.devices
    began_with = before.get("config", {})
    dtype, notes = choices.resolve_dtype(config.dtype, began_with.get("dtype"), placed.gpus)
    config = dataclasses.replace(config, dtype=dtype)
    # The run keeps what `auto` chose at its first start.
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
    workload.check_dataset(dataset)
    examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
    input_stream.check_options(examples, config.dump_bad_batch, config.elastic)
    most = dataclasses.replace(placed, num_workers=config.most_workers or placed.num_workers)
    config, chosen = choices.resolve_variable_update(config, began_with.get("variable_update"), most)
    config = dataclasses.replace(config, stall_timeout_secs=choices.stall_timeout_secs(config, most))
    graph = training_graph(workload, examples, config, placed)
    options = dataclasses.asdict(config) | {"workload": path}
    run_json = manifest.describe(
        workload, examples, options, config.global_batch, placed.names, graph.saved.num_parameters,
        graph.random_numbers._asdict(),
    )  # fmt: skip
    run_json["data"]["order"] = graph.stream.order
    notes += [
        *chosen,
        *placed.notes,
        *graph.stream.notes,
        *report.random_notes(graph.random_numbers),
    ]
    last_step = config.last_step(examples.num_examples)
    start = Start(config, workload, examples, graph, run_dir, run_json, notes, last_step)
    return _prepare_chief(start, before, stack) if membership.task.is_chief else start


def rebuilt(start: Start, membership: Membership) -> Start:
    """Returns the start with a graph for the membership's devices, which are others than when it was prepared."""
    graph = training_graph(start.workload, start.examples, start.config, membership.devices)
    if not start.is_chief:
        return dataclasses.replace(start, graph=graph)
    drawing = start.drawing and summaries.drawing(graph.graph)
    resumed = resume.find(start.run_dir, graph, start.config, is_known=True)
    return dataclasses.replace(start, graph=graph, drawing=drawing, resumed=resumed)


def _prepare_chief(start: Start, before: dict, stack: contextlib.ExitStack) -> Start:
    """Adds the chief's parts. before: run.json of the last start."""
    config, run_dir, workload, examples = start.config, start.run_dir, start.workload, start.examples
    drawing = summaries.drawing(start.graph.graph)  # before the operations that restore a checkpoint
    notes = start.notes + manifest.check_resume(run_dir.path, before, start.run_json, config.override, workload.options)
    resumed = resume.find(run_dir, start.graph, config, is_known=bool(before))
    notes += resumed.notes
    notes += profile.check(config.profile_steps, resumed.step, start.last_step)
    is_checked = config.check_data and not resumed.path
    if is_checked:
        notes += data_check.warnings(workload, examples)
    patience = config.stop_after_no_gain_epochs * examples.num_examples
    evaluations = Evaluations(
        run_dir,
        config.eval_every_steps,
        start.last_step if config.eval_at_end else None,
        functools.partial(_evaluators, config, workload, examples),
        best.Best(run_dir, config.keep_best, patience, config.global_batch),
    )
    stack.callback(evaluations.close)
    notes += evaluations.try_out(resumed.step, start.last_step, start.graph.saved.variables)
    tested = evaluations.examples
    if tested and tested.notice and tested.notice != examples.notice:
        notes.append(f"*** {tested.notice}")
    if is_checked and tested:
        notes += data_check.of_all_labels(tested)
    evaluations.begin(resumed.step, resumed.path)
    run_json = start.run_json | {"drawing": hashlib.sha256(drawing).hexdigest()[:16]}
    is_drawn = resumed.step and before.get("drawing") == run_json["drawing"]
    return dataclasses.replace(
        start, notes=notes, steps_done=resumed.step, resumed=resumed, evaluations=evaluations, run_json=run_json,
        drawing=None if is_drawn else drawing,
    )  # fmt: skip


def _evaluators(config: Config, workload: Workload, examples: Examples) -> dict[str, Evaluator]:
    """Makes evaluators on the test examples and on some training examples; each builds a graph."""
    request = DataRequest("test", examples.dataset, config.data_dir, config.seed)
    evaluated = {TEST: workload.examples(request)}
    if config.train_eval_examples:
        evaluated[TRAIN] = examples.sample(config.train_eval_examples)
    placed = devices.place(config)
    return {
        name: Evaluator(workload, each, config.tower_batch, config.dtype, config.moving_average_decay, placed)
        for name, each in evaluated.items()
    }
