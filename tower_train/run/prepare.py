"""Preparing a start of a run: examples, graph and, in the chief, the checkpoint to begin at."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.config import Config
from tower_train.console import enumeration
from tower_train.graph import elements, summaries
from tower_train.graph.record import TrainingGraph
from tower_train.graph.training import training_graph
from tower_train.run import choices, data_check, report
from tower_train.run.evaluations import Evaluations
from tower_train.run_dir import checkpoint, directory, manifest
from tower_train.workload import DataRequest, Examples, Workload

_MOST_NAMES = 10  # of variables, in a line


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint at which a start begins.

    Attributes:
      checkpoints: saves the graph's variables.
      path: of the checkpoint to restore; None at step 0.
      step: the last step done.
      restore: sets all variables in a session from the checkpoint; None at step 0.
      notes: lines about damaged checkpoints and variables that the checkpoint lacks.
    """

    checkpoints: checkpoint.Checkpoints
    path: str | None = None
    step: int = 0
    restore: Callable[[tf.compat.v1.Session], None] | None = None
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run in one worker, ready for its steps.

    Its config has the final dtype, place of the variables and workers.

    Attributes:
      steps_done: of earlier starts; final once the start is announced, as is `end`.
      end: the last step of this start.
      resumed: the checkpoint to begin at; None but in the chief.
      evaluations: of the run's checkpoints; None but in the chief.
      drawing: the graph for TensorBoard; None if the event files have it, and but in the chief.
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
    end: int = 0
    resumed: ResumePoint | None = None
    evaluations: Evaluations | None = None
    drawing: bytes | None = None

    @property
    def is_chief(self) -> bool:
        return self.resumed is not None

    @property
    def steps(self) -> range:
        """The numbers of the steps to do."""
        return range(self.steps_done + 1, self.end + 1)

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
    manifest.check_workload(run_dir.path, before, workload, config.override)  # before its examples are downloaded
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
    workload.check_dataset(dataset)
    examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
    _check_elastic(examples, config)
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
    resumed = _resume_point(start.run_dir, graph, start.config, is_known=True)
    return dataclasses.replace(start, graph=graph, drawing=drawing, resumed=resumed)


def _prepare_chief(start: Start, before: dict, stack: contextlib.ExitStack) -> Start:
    """Adds the chief's parts. before: run.json of the last start."""
    config, run_dir, workload, examples = start.config, start.run_dir, start.workload, start.examples
    drawing = summaries.drawing(start.graph.graph)  # before the operations that restore a checkpoint
    notes = start.notes + manifest.check_resume(run_dir.path, before, start.run_json, config.override, workload.options)
    resumed = _resume_point(run_dir, start.graph, config, is_known=bool(before))
    notes += resumed.notes
    notes += _check_profile(config.profile_steps, resumed.step, start.last_step)
    is_checked = config.check_data and not resumed.path
    if is_checked:
        notes += data_check.warnings(workload, examples)
    evaluations = Evaluations(run_dir, config, workload, examples)
    stack.callback(evaluations.close)
    notes += evaluations.try_out(resumed.step, start.graph.saved.variables)
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


def _check_elastic(examples: Examples, config: Config) -> None:
    """Raises ConfigError for --elastic with examples that it cannot serve."""
    if config.elastic and examples.elements:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: {examples.name} comes in an order of its own, in which each worker has a "
            "place that no other number of workers can go on from. Leave the option out, or fetch the data by index."
        )


def _check_profile(steps: tuple[int, ...] | None, steps_done: int, last_step: int) -> list[str]:
    """Returns a line about --profile_steps that earlier starts have done; raises ConfigError if they come after the
    last."""
    if steps and steps[0] > last_step:
        raise errors.ConfigError(
            f"--profile_steps={steps[0]},{steps[1]}: the run ends at step {last_step}. Choose earlier steps, or train "
            "longer."
        )
    if steps and steps[1] <= steps_done:
        return [f"*** --profile_steps={steps[0]},{steps[1]}: those steps were done before. Nothing is profiled."]
    return []


def _resume_point(run_dir: directory.RunDirectory, graph: TrainingGraph, config: Config, is_known: bool) -> ResumePoint:
    """Finds the newest intact checkpoint in a locked directory, for a graph that is not finalised.

    With --override it may be of another program (is_known: there was a run.json) or lack variables.

    Raises:
      RunError: the checkpoint is none of this run, or none is intact.
    """
    with graph.graph.as_default():
        checkpoints = checkpoint.Checkpoints(run_dir.path, graph.saved.variables, config.keep_checkpoints)
        newest = checkpoint.latest(run_dir.path)
        if not newest:
            return ResumePoint(checkpoints)
        if not is_known and not config.override:
            raise errors.RunError(
                f"--train_dir={run_dir.path} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of "
                "this program. Give another directory, or --override to start from that checkpoint."
            )
        newest, notes = checkpoint.newest_intact(run_dir.path)
        begun_anew = []
        if _begins_anew(graph, newest, checkpoint.variable_names(newest), config.on_worker_change):
            begun_anew = [variable.op.name for variable in graph.stream.state.variables]
            notes.append(
                f"*** {newest} is of another number of workers than {graph.layout.num_workers}: {graph.examples.name} "
                "begins its next epoch, without the rest of the one under way."
            )
        restore, fresh = checkpoints.plan_restore(newest, config.override, begun_anew)
        if fresh:
            notes.append(f"Not in {newest}, initialised afresh: {enumeration(fresh, _MOST_NAMES)}.")
        return ResumePoint(checkpoints, newest, checkpoint.step_of(newest), restore, notes)


def _begins_anew(graph: TrainingGraph, path: str, saved: Sequence[str], on_worker_change: str) -> bool:
    """Returns whether a checkpoint's positions are of another number of workers, so that none is used.

    Args:
      graph: the graph that resumes from it.
      path: of the checkpoint.
      saved: the names of its variables.
      on_worker_change: the option.

    Raises:
      RunError: they are, and on_worker_change refuses that.
    """
    saved_by = set(filter(None, map(elements.saved_by, saved))) if graph.stream.state else set()
    if not saved_by or graph.layout.num_workers in saved_by:
        return False
    if on_worker_change == "refuse":
        raise errors.RunError(
            f"{path}: workers were {max(saved_by)}, now {graph.layout.num_workers}, and it holds their old positions "
            f"in {graph.examples.name}. Go on with as many, or give --on_worker_change=next_epoch, which leaves out "
            "the rest of the current epoch."
        )
    return True
