"""A run on disk in use: its workload, its checkpoint, its examples; and its evaluation, also while it trains."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tower_train import console, errors
from tower_train.config import EvaluateOptions, RunOptions
from tower_train.examples import TEST, TRAIN, VALIDATION, DataRequest, Examples
from tower_train.graph import devices
from tower_train.inference.evaluator import Evaluation, Evaluator
from tower_train.run_dir import best, checkpoint, directory, logs
from tower_train.workload import Workload, load

v1 = tf.compat.v1
RESULT_NAMES = {TEST: "evaluation", VALIDATION: "validation", TRAIN: "train_evaluation"}  # in result.json
WATCH_SECS = 5.0  # between looks for a new checkpoint


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run on disk: its directory, its workload under the run's and the command's options, its examples to evaluate.

    split: of the examples. moving_average_decay is 0 if the weights themselves are used. takes_best: use the best
    checkpoint, not the newest.
    """

    directory: directory.RunDirectory
    workload: Workload
    split: str
    examples: Examples
    dtype: str
    moving_average_decay: float
    takes_best: bool

    def checkpoint(self) -> str:
        """Returns the path of the checkpoint to use; RunError if there is none."""
        if self.takes_best:
            return best.path(self.directory)
        if newest := checkpoint.latest(self.directory.path):
            return newest
        raise errors.RunError(
            f"--train_dir={self.directory.path} holds no checkpoint yet. Wait until its trainer has saved one, as "
            "`python -m tower_train.evaluate --watch` does."
        )

    def session(self, graph: tf.Graph, restored: Mapping[str, tf.Variable], placed: devices.Devices) -> v1.Session:
        """Opens a session with variables {name in the checkpoint: variable}; RunError if there is no checkpoint, or one
        of another network."""
        with graph.as_default():
            saver, prepare = v1.train.Saver(restored), [v1.local_variables_initializer(), v1.tables_initializer()]
        session = v1.Session(graph=graph, config=placed.session_config)
        session.run(prepare)
        checkpoint.restore(saver, session, self.checkpoint())
        return session


def run_directory(options: RunOptions) -> directory.RunDirectory:
    """Returns the directory of a run; RunError if there is none."""
    run_dir = directory.RunDirectory(options.train_dir)
    run_dir.check_links()
    if not run_dir.read(directory.RUN):
        raise errors.RunError(
            f"--train_dir={options.train_dir} holds no run: {directory.RUN} is missing. Give the directory that the "
            "trainer names in its first lines."
        )
    return run_dir


def read(
    options: RunOptions,
    workload: Workload | None = None,
    splits: Sequence[str] = (TEST, VALIDATION, TRAIN),
) -> SavedRun:
    """Finds a run, and sets this process to compute as it did. The first of these splits that is there is used.

    Raises:
      RunError: no run there, a damaged one, or one of another workload.
      ConfigError: options.dataset is none of the workload's.
    """
    run_dir = run_directory(options)
    run_json = run_dir.read(directory.RUN)
    config = run_json["config"]
    path = options.workload or config["workload"]
    if not (workload or path):
        raise errors.RunError(
            f"--train_dir={options.train_dir} was trained from Python: add --workload=MODULE or --workload=MODULE:NAME "
            f"to say where its workload {run_json['workload']!r} is."
        )
    workload = workload or load(path, options.train_dir, None if options.workload else run_json)
    if workload.name != run_json["workload"]:
        raise errors.RunError(
            f"--train_dir={options.train_dir} is a run of workload {run_json['workload']}, not of {workload.name}. "
            "Give --workload=PATH of the one that was trained."
        )
    try:
        known = dataclasses.asdict(workload.options) if workload.options else {}
        chosen = run_json.get("workload_options", {}).items()
        # an option that the workload had when it trained, and that was off, changes nothing
        workload = workload.with_options({name: value for name, value in chosen if value or name in known})
    except errors.ConfigError as error:
        raise errors.RunError(f"{run_dir.path / directory.RUN} does not fit its workload: {error}") from None
    if options.single_view:
        workload = dataclasses.replace(workload, test_time_augmentation=None)
    data_dir, dataset = options.data_dir or config["data_dir"], options.dataset or run_json["dataset"]
    workload.check_dataset(dataset)
    request = DataRequest(TEST, dataset, data_dir, config["seed"], config["validation_fraction"])
    split, examples = workload.first_split(request, splits)
    examples.check_same_classes(f"the run {run_dir.path}", run_json["data"].get("class_names", examples.class_names))
    devices.choose_kernels(config["deterministic"], config["tensor_float_32"])
    decay = 0.0 if options.raw else config["ema"]
    return SavedRun(run_dir, workload, split, examples, config["dtype"], decay, options.best)


def evaluate_run(options: EvaluateOptions, workload: Workload | None = None) -> Iterator[Evaluation]:
    """Evaluates a run's newest checkpoint, or with options.watch each new one until the run has ended.

    Writes each evaluation to the run's result.json and event files, or says on standard error that it cannot, and
    yields it. Imports the workload by the path in options or in run.json if it is None.

    Raises:
      RunError: no run there, no checkpoint, one of another network, or a damaged result.json.
    """
    placed = devices.place(options)  # before anything uses a device
    run = read(options, workload, (TEST, VALIDATION) if options.split == "auto" else (options.split,))
    run.directory.read(directory.RESULT)  # raises if it is damaged
    if not options.watch:
        run.checkpoint()  # raises if there is none, before the graph is built
    evaluator = Evaluator(
        run.workload,
        run.examples,
        options.batch_size,
        run.dtype,
        run.moving_average_decay,
        placed,
        placed.compiles(options.jit_compile),
    )
    # What is evaluated in another way than during training has curves of its own.
    ways = [options.raw and "raw", options.single_view and "single_view", options.dataset]
    writer = logs.EventWriter(run.directory.path, "-".join(filter(None, [curves_folder(run.split), *ways])))
    with contextlib.closing(evaluator), contextlib.closing(writer):
        watched = _watched(run, evaluator)
        for evaluation in watched if options.watch else [evaluator.evaluate(run.checkpoint())]:
            if _is_kept(run, evaluation) or options.watch:
                write_curves(writer, evaluation)
            yield evaluation


def curves_folder(split: str) -> str:
    """Returns the folder of the event files of a split's evaluations."""
    return "eval" if split == TEST else f"eval-{split}"


def _is_kept(run: SavedRun, evaluation: Evaluation) -> bool:
    """Writes an evaluation to result.json; says so if it cannot, as on a read-only run."""
    try:
        run.directory.update(directory.RESULT, {RESULT_NAMES[run.split]: evaluation.as_dict()})
    except errors.RunError as error:
        console.notice(console.one_line(f"the evaluation of step {evaluation.step} is shown, not kept: {error}"))
        return False
    return True


def write_curves(writer: logs.EventWriter, evaluation: Evaluation, prefix: str = "") -> None:
    """Adds a point to each metric's curve, whose name begins with `prefix`."""
    means = {prefix + name: metric.mean for name, metric in evaluation.metrics.items()}
    logs.add_scalars(writer, means, evaluation.step)


def _watched(run: SavedRun, evaluator: Evaluator) -> Iterator[Evaluation]:
    """Evaluates each newest checkpoint once, until the run has ended."""
    step, is_waiting = None, False
    while True:
        # Asked first, so that the next round sees a last checkpoint saved after the look below.
        is_training, has_ended = run.directory.is_locked(), run.directory.has_ended()
        path = checkpoint.latest(run.directory.path)
        if path and checkpoint.saved_step(path) != step:
            try:
                evaluation = evaluator.evaluate(path)
            except errors.RunError:
                if checkpoint.latest(run.directory.path) == path:
                    raise
                continue  # a trainer has replaced it
            step = evaluation.step
            yield evaluation
        elif has_ended:
            break
        else:
            if not (is_training or is_waiting):
                console.notice("the run has not ended, and no trainer is at work: waiting for one. Ctrl-C ends this.")
            is_waiting = not is_training
            time.sleep(WATCH_SECS)
