"""Preparing a start of a run: examples, graph and, in the chief, the checkpoint to begin at."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.cluster.membership import Membership
from tower_train.config import Config
from tower_train.console import enumeration
from tower_train.examples import DataRequest, Examples
from tower_train.graph import elements, schedule
from tower_train.graph.record import TrainingGraph
from tower_train.graph.training import training_graph
from tower_train.options import as_text
from tower_train.proof.towers import compare_towers
from tower_train.run import choices, data_check, messages
from tower_train.run.evaluations import Evaluations
from tower_train.run_dir import checkpoint, directory, manifest
from tower_train.workload import Workload

_MOST_NAMES = 10  # of variables, in a line
_COMPARED = "compared_with_one_tower"  # key of run.json


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run in one worker, ready for its steps.

    Its config has the final dtype, place of the variables and workers.

    Attributes:
      batches_before: of a step of the last start, over all towers of all workers; 0 without one.
      other_mode: whether variables had another place at the last start, or batches another normalisation.
      steps_done: of earlier starts; final once the start is announced, as is `end`.
      end: the last step of this start.
      checkpoints: saves the graph's variables; None but in the chief.
      restore: sets all variables in a session from the checkpoint to begin at; None without one.
      evaluations: of the run's checkpoints; None but in the chief.
      sheet: of the first examples of a new run, a PNG; None if it was not drawn.
    """

    config: Config
    workload: Workload
    examples: Examples
    graph: TrainingGraph
    run_dir: directory.RunDirectory
    run_json: dict
    notes: list[str]
    last_step: int
    batches_before: int = 0
    other_mode: bool = False
    steps_done: int = 0
    end: int = 0
    checkpoints: checkpoint.Checkpoints | None = None
    restore: Callable[[tf.compat.v1.Session], None] | None = None
    evaluations: Evaluations | None = None
    sheet: bytes | None = None

    @property
    def is_chief(self) -> bool:
        return self.checkpoints is not None

    @property
    def has_other_towers(self) -> bool:
        """Whether a step had another number of batches at the last start, or its towers another mode."""
        return self.batches_before not in (0, self.config.batches_per_step) or self.other_mode

    def is_summarized(self, step: int) -> bool:
        """Returns whether a step makes a summary, which only the chief writes."""
        every = self.config.summary_every_steps if self.is_chief else 0
        return every > 0 and step % every == 0


def prepare(
    path: str | None, workload: Workload, config: Config, run_dir: directory.RunDirectory, membership: Membership,
    stack: contextlib.ExitStack,
) -> Start:  # fmt: skip
    """Loads the examples, builds the graph and, in the chief, finds the checkpoint to begin at.

    The sessions of the start's evaluations are closed with the stack.
    """
    before, placed = run_dir.read(directory.RUN), membership.devices
    manifest.check_workload(run_dir.path, before, workload, config.override)  # before its examples are downloaded
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
    workload.check_dataset(dataset)
    examples = workload.split(DataRequest("train", dataset, config.data_dir, config.seed, config.validation_fraction))
    _check_elastic(examples, config)
    config, notes = choices.resolve(config, before.get("config", {}), placed)
    graph = training_graph(workload, examples, config, placed)
    options = dataclasses.asdict(config) | {"workload": path}
    run_json = manifest.describe(
        workload, examples, options, config.global_batch, placed.names, graph.saved.num_parameters,
        graph.random_numbers._asdict(),
    )  # fmt: skip
    notes += [*placed.notes, *graph.notes, *messages.random_notes(graph.random_numbers)]
    last_step = config.last_step(examples.num_examples)
    start = Start(
        config, workload, examples, graph, run_dir, run_json, notes, last_step, _batches(before),
        _is_other_mode(before, config),
    )  # fmt: skip
    return _prepare_chief(start, before, stack) if membership.task.is_chief else start


def rebuilt(start: Start, membership: Membership) -> Start:
    """Returns the start with a graph for the membership's devices, which are others than when it was prepared."""
    graph = training_graph(start.workload, start.examples, start.config, membership.devices)
    start = dataclasses.replace(start, graph=graph)
    return _resumed(start, is_known=True)[0] if start.is_chief else start


def with_towers_compared(start: Start) -> Start:
    """Returns the start with the outcome of its towers' comparison with one; GraphError if they differ."""
    outcome = compare_towers(start.workload, start.examples, start.config, start.graph)
    if isinstance(outcome, str):
        return dataclasses.replace(start, notes=[*start.notes, outcome])
    run_json = start.run_json | {_COMPARED: outcome.record}
    return dataclasses.replace(start, notes=[*start.notes, outcome.line], run_json=run_json)


def _batches(run_json: dict) -> int:
    """Returns the number of batches of a step by run.json, over all towers of all workers; 0 if it is empty."""
    options = run_json.get("config", {})
    workers = len((options.get("worker_hosts") or "").split(","))
    return len(run_json.get("devices", ())) * options.get("accumulate_steps", 1) * workers


def _is_other_mode(run_json: dict, config: Config) -> bool:
    options = run_json.get("config", {})
    modes = ("variable_update", "batch_norm")
    return any(options[name] != getattr(config, name) for name in modes if name in options)


def _prepare_chief(start: Start, before: dict, stack: contextlib.ExitStack) -> Start:
    """Adds the chief's parts. before: run.json of the last start."""
    config, workload = start.config, start.workload
    notes = manifest.check_resume(start.run_dir.path, before, start.run_json, config.override, workload.options)
    start, path, fit_notes = _resumed(start, is_known=bool(before))
    notes = start.notes + notes + fit_notes
    if before.get("config"):
        ends = {name: before["config"].get(name) for name in ("max_steps", "epochs")}
        earlier = dataclasses.replace(config, **ends)
        notes += schedule.note_on_resuming(config, earlier, start.examples.num_examples, start.steps_done)
    if config.profile_steps and config.profile_steps[0] > start.last_step:
        raise errors.ConfigError(
            f"--profile_steps={as_text(config.profile_steps)}: the run ends at step {start.last_step}. Choose earlier "
            "steps, or train longer."
        )
    if config.check_data and not path:
        warnings, sheet = data_check.look(workload, start.examples, config.seed)
        start, notes = dataclasses.replace(start, sheet=sheet), notes + warnings
    evaluations = Evaluations(start.run_dir, config, workload, start.examples)
    stack.callback(evaluations.close)
    notes += evaluations.begin(start.steps_done, path, start.graph.saved.variables)
    kept = {_COMPARED: before[_COMPARED]} if _COMPARED in before else {}
    return dataclasses.replace(start, notes=notes, evaluations=evaluations, run_json=start.run_json | kept)


def _check_elastic(examples: Examples, config: Config) -> None:
    """Raises ConfigError for --elastic with examples that it cannot serve."""
    if config.elastic and examples.elements:
        raise errors.ConfigError(
            f"--elastic={config.elastic}: {examples.name} comes in an order of its own, in which each worker has a "
            "place that no other number of workers can go on from. Leave the option out, or fetch the data by index."
        )


def _resumed(start: Start, is_known: bool) -> tuple[Start, str | None, list[str]]:
    """Finds the newest intact checkpoint in a locked directory, for a graph that is not finalised.

    With --override it may be of another program (is_known: there was a run.json) or lack variables.

    Returns:
      The start at the checkpoint's step; its path, None without one; lines about damaged checkpoints and variables
        that it lacks.

    Raises:
      RunError: the checkpoint is none of this run, or none is intact.
    """
    graph, folder, override = start.graph, start.run_dir.path, start.config.override
    with graph.graph.as_default():
        checkpoints = checkpoint.Checkpoints(folder, graph.saved.variables, start.config.keep_checkpoints)
        start, newest = dataclasses.replace(start, checkpoints=checkpoints), checkpoint.latest(folder)
        if not newest:
            return start, None, []
        if not is_known and not override:
            raise errors.RunError(
                f"--train_dir={folder} holds a checkpoint ({newest}) but no {directory.RUN}: it is no run of this "
                "program. Give another directory, or --override to start from that checkpoint."
            )
        newest, notes = checkpoint.newest_intact(folder)
        if not override:
            _check_positions(graph, newest, checkpoint.variable_names(newest))
        restore, fresh = checkpoints.plan_restore(newest, override)
        if fresh:
            notes.append(f"Not in {newest}, initialised afresh: {enumeration(fresh, _MOST_NAMES)}.")
        return dataclasses.replace(start, steps_done=checkpoint.step_of(newest), restore=restore), newest, notes


def _check_positions(graph: TrainingGraph, path: str, saved: Sequence[str]) -> None:
    """Raises RunError if the positions in a checkpoint with these variables are of another number of workers."""
    saved_by = set(filter(None, map(elements.saved_by, saved))) if graph.stream.state else set()
    if saved_by and graph.layout.num_workers not in saved_by:
        raise errors.RunError(
            f"{path}: workers were {max(saved_by)}, now {graph.layout.num_workers}, and it holds their old positions "
            f"in {graph.examples.name}. Go on with as many, or give --override, which begins the data anew, without "
            "the rest of the current epoch."
        )
