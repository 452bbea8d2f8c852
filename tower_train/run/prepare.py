"""Preparing a start of a run: examples, graph and, in the chief, the checkpoint to begin at."""

import dataclasses
import functools
from collections.abc import Callable

from tower_train.cluster.single_process import SingleProcess
from tower_train.config import Config
from tower_train.graph import devices
from tower_train.graph.record import TrainingGraph
from tower_train.graph.training import training_graph
from tower_train.inference.evaluator import Evaluator
from tower_train.run import bad_batch, data_check, dtypes, input_stream, resume
from tower_train.run.evaluations import Evaluations, Plan
from tower_train.run_dir import best, directory, manifest
from tower_train.workload import DataRequest, Examples, Workload


@dataclasses.dataclass(frozen=True)
class ChiefStart:
    """The chief's part of a start: the run directory is the chief's alone to read and write.

    Attributes:
      resumed: the checkpoint to begin at.
      evaluations: of the checkpoints to come.
      dump: writes the batch of (step, first position) to a file and returns its path; None: no batch is written.
    """

    resumed: resume.ResumePoint
    evaluations: Evaluations
    dump: Callable[[int, int], str] | None


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run in one worker, ready to do its steps.

    Attributes:
      config: with the dtype and the workers that were found.
      workload: with its options.
      examples: to train on.
      graph: the training graph.
      run_dir: the run's, locked by the chief.
      run_json: the content of run.json.
      notes: lines for people.
      last_step: the step that the run goes to.
      first_step: the last step done before; in workers that are not the chief known once it is announced.
      has_steps: whether there are steps to do.
      chief: what only the chief has; None in the other workers.
    """

    config: Config
    workload: Workload
    examples: Examples
    graph: TrainingGraph
    run_dir: directory.RunDirectory
    run_json: dict
    notes: list[str]
    last_step: int
    first_step: int = 0
    has_steps: bool = True
    chief: ChiefStart | None = None


def prepare(
    path: str | None, workload: Workload, config: Config, run_dir: directory.RunDirectory, membership: SingleProcess
) -> Start:
    """Loads the examples, builds the graph and, in the chief, finds the checkpoint to begin at."""
    before = run_dir.read(directory.RUN)
    dtype, notes = dtypes.resolve(
        config.dtype, before.get("config", {}).get("dtype"), config.device, config.gpus or range(config.num_towers)
    )
    config = dataclasses.replace(config, dtype=dtype)
    # What `auto` chose at the first start is what the run stays with.
    dataset = before.get("dataset", "auto") if config.dataset == "auto" else config.dataset
    examples = workload.examples(DataRequest("train", dataset, config.data_dir, config.seed))
    input_stream.check_options(examples, config.dump_bad_batch)
    graph = training_graph(workload, examples, config, membership.devices)
    options = dataclasses.asdict(config) | {"workload": path}
    run_json = manifest.describe(
        workload, examples, options, config.global_batch, membership.devices.names, graph.num_parameters
    )
    last_step = config.last_step(examples.num_examples)
    start = Start(config, workload, examples, graph, run_dir, run_json, notes, last_step)
    return _prepare_chief(start, before) if membership.task.is_chief else start


def _prepare_chief(start: Start, before: dict) -> Start:
    """Adds what only the chief has. before: run.json of the last start."""
    config, run_dir, workload, examples = start.config, start.run_dir, start.workload, start.examples
    notes = [*start.notes, *run_dir.warnings()]
    notes += manifest.check_resume(run_dir.path, before, start.run_json, config.override, workload.options)
    resumed = resume.find(run_dir, start.graph, config.keep_checkpoints, config.override, is_known=bool(before))
    notes += resumed.notes
    if config.check_data and not resumed.path:
        notes += data_check.warnings(workload, examples)
    plan = Plan(config.eval_every_steps, config.eval_at_end, start.last_step)
    best_checkpoint = best.Best(
        run_dir, keep=config.keep_best, patience_epochs=config.stop_after_no_gain_epochs,
        every_steps=config.eval_every_steps, num_examples=examples.num_examples, global_batch=config.global_batch,
    )  # fmt: skip
    evaluations = Evaluations(plan, functools.partial(_evaluators, start), best_checkpoint, run_dir)
    evaluations.begin(resumed.step, resumed.path)
    dump = None
    if config.dump_bad_batch:
        sizes = config.tower_batch, config.batches_per_step
        dump = bad_batch.writer(run_dir.path, workload, examples, config.seed, *sizes)
    chief = ChiefStart(resumed, evaluations, dump)
    return dataclasses.replace(start, notes=notes, first_step=resumed.step, chief=chief)


def _evaluators(start: Start) -> dict[str, Evaluator]:
    """Evaluators on the test examples and on some training examples; each builds a graph."""
    config, examples = start.config, start.examples
    request = DataRequest("test", examples.dataset, config.data_dir, config.seed)
    evaluated = {"test": start.workload.examples(request)}
    if config.train_eval_examples:
        evaluated["train"] = examples.sample(config.train_eval_examples)
    placed = devices.place(config)
    return {
        name: Evaluator(start.workload, each, config.tower_batch, config.dtype, config.moving_average_decay, placed)
        for name, each in evaluated.items()
    }
