"""A training task as a user brings it to the trainer: examples, inference, loss, metrics.

A workload is one frozen record of functions. They are called for each tower while the graph is built, so they must
create variables through `tf.compat.v1.get_variable` only (tower 0 creates them, later towers reuse them), draw random
numbers through `tower_train.layers` only, and must not depend on the tower.

    WORKLOAD = Workload(name="mine", examples=load, inference=network, loss=softmax_cross_entropy)
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import site
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import flags

from tower_train import config, errors, user_functions
from tower_train.examples import TEST, TRAIN, VALIDATION, DataRequest, Examples, Tensors
from tower_train.measures import MAX, MIN, MODES, classification_metrics, softmax_cross_entropy
from tower_train.options import Options, without_useless

OURS = "cifar10"  # the package beside this one, whose name the tutorial's companion file has too


class Draws(Protocol):
    """Random numbers of one batch: a function of (seed, position), never of the batch, the tower or the time."""

    positions: tf.Tensor  # int64 [batch], consecutive places in the endless stream of examples
    epochs: tf.Tensor  # int64 [batch], passes over the examples before: positions // num_examples if none is left out

    def uniform(self, name: str, count: int) -> tf.Tensor:
        """Returns float32 [batch, count], uniform in [0, 1). Another name gives independent numbers."""

    def per_example(self, name: str, count: int) -> tf.Tensor:
        """Returns numbers as `uniform`, but a function of (seed, name, the example's index): the same in every epoch.
        Raises GraphError for examples in their own order, without indices."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training task."""

    name: str  # names the default train_dir
    # DataRequest -> Examples; None for a test or validation split that is not there
    examples: Callable[[DataRequest], Examples]
    # (features, training) -> outputs [batch, ...]. Weight decay is declared as a variable's `regularizer=`
    inference: Callable[[Tensors, bool], Tensors] | None
    # (outputs, labels) -> scalar, the mean over the given batch; or an object of keras.losses. It takes `weights` too
    # if labels are Weighted
    loss: Callable[[Tensors, Tensors], tf.Tensor] = softmax_cross_entropy
    # (outputs, labels) -> {name: float [batch]}; evaluation averages each over all examples. Or a sequence of metrics
    # of the whole set: keras.metrics objects, and functions (outputs, labels) -> a number, of numpy arrays of all
    # examples. The first one decides which checkpoint is the best
    metrics: Callable[[Tensors, Tensors], Mapping[str, tf.Tensor]] | Sequence[Any] = classification_metrics
    # {name of a metric: 'min' or 'max'}, what is best; known of the trainer's own
    mode: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, kw_only=True)
    # (features, draws) -> features, the random preprocessing of training examples; None for none
    augment: Callable[[Tensors, Draws], Tensors] | None = None
    # features -> features, the preprocessing for evaluation, and for training if augment is None
    prepare: Callable[[Tensors], Tensors] | None = None
    # (prepared features, labels, draws) -> (features, labels), such as mixup: mixes training examples 2k and 2k + 1 of
    # a batch, which is even then. Its labels may be `examples.Mixed`
    mix: Callable[[Tensors, Tensors, Draws], tuple[Tensors, Tensors]] | None = dataclasses.field(
        default=None, kw_only=True
    )
    # whether `augment` and `prepare` are made for GPUs: of operations that have kernels there, on whole batches, and of
    # no fewer bytes after than before. --augment_on=auto then runs them there
    augments_on_devices: bool = dataclasses.field(default=False, kw_only=True)
    # prepared features -> (weight, features) of several views of each example, such as mirror images; evaluation and
    # export take the weighted mean of the outputs over them. The weights sum to 1. None: one view, as it is prepared
    test_time_augmentation: Callable[[Tensors], Sequence[tuple[float, Tensors]]] | None = None
    # outputs of the first view -> bool [batch], the examples whose outputs are the mean over views; the others' are
    # those of the first view, which saves their time. None: all
    unsure: Callable[[Tensors], tf.Tensor] | None = dataclasses.field(default=None, kw_only=True)
    # the splits that `examples` knows; with 'validation' it sets DataRequest.validation_fraction aside itself
    splits: tuple[str, ...] = dataclasses.field(default=(TRAIN, TEST), kw_only=True)
    datasets: tuple[str, ...] = ("auto",)  # the allowed values of --dataset, and so of `DataRequest.dataset`
    # Examples -> inference, instead of `inference`, for a network that depends on the data, such as on the number of
    # classes, or begins with values made from it (initializers.FromExamples). It gets the training examples or, in
    # evaluation and export, the test examples
    inference_for: Callable[[Examples], Callable[[Tensors, bool], Tensors]] | None = None
    # the values of its own options, a record of a subclass of Options; None if it has none
    options: Options | None = None
    # options -> Workload, the same workload with other values of its options
    configure: Callable[[Any], "Workload"] | None = None
    # the values of the trainer's options that suit it, unless the user gives others
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    # {name: values of its own options}, for --recipe=NAME; each makes a workload with a `recipe` of its own
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        for name, value in self.mode.items():
            if value not in (MIN, MAX):
                raise errors.ConfigError(
                    f"workload {self.name}: mode={{{name!r}: {value!r}}}; it must be {MIN!r} or {MAX!r}."
                )
        for metric in self.metrics if isinstance(self.metrics, list | tuple) else [self.metrics]:
            if not (callable(metric) or hasattr(metric, "update_state")):
                raise errors.ConfigError(
                    f"workload {self.name}: metrics has {metric!r}. Give keras.metrics objects, such as "
                    "keras.metrics.AUC(), or functions of (outputs, labels)."
                )
        options = [field.name for field in dataclasses.fields(config.Config)]
        for name in self.recipe:
            if name not in options:
                raise errors.ConfigError(
                    f"workload {self.name}: its recipe names {name!r}, which is no option of the trainer. "
                    "python -m tower_train --help lists them."
                )

    def metric_mode(self, metric: str) -> str | None:
        """Returns 'min' or 'max', the best values of a metric; None if unknown."""
        return self.mode.get(metric, MODES.get(metric))

    def for_examples(self, examples: Examples) -> "Workload":
        """Returns this workload with the network for these examples."""
        return dataclasses.replace(self, inference=self.inference_for(examples)) if self.inference_for else self

    def split(self, request: DataRequest) -> Examples | None:
        """Returns the examples of a split; None for a test or validation split that is not there."""
        is_divided = request.validation_fraction and VALIDATION not in self.splits and request.split != TEST
        if is_divided:
            examples = user_functions.call(self, "examples", dataclasses.replace(request, split=TRAIN))
            kept, aside = examples.set_aside(request.validation_fraction, request.seed)
            return aside if request.split == VALIDATION else kept
        return user_functions.call(self, "examples", request) if request.split in self.splits else None

    def first_split(self, request: DataRequest, splits: Sequence[str]) -> tuple[str, Examples]:
        """Returns the first of these splits that is there, and its examples; ConfigError if there is none."""
        for split in splits:
            if examples := self.split(dataclasses.replace(request, split=split)):
                return split, examples
        raise errors.ConfigError(
            f"workload {self.name}: there are no {' or '.join(splits)} examples to evaluate. Add some to the data, or "
            "set a tenth of the training examples aside, with --validation_fraction=0.1 when the run begins."
        )

    def with_options(self, values: Mapping[str, Any]) -> "Workload":
        """Returns this workload with some of its own options changed, by name; ConfigError for an unknown option or a
        bad value."""
        there = [field.name for field in dataclasses.fields(self.options)] if self.options else []
        for name in values:
            if name not in there:
                raise errors.ConfigError(
                    f"workload {self.name} has no option {name!r}. Its options are: {', '.join(there) or 'none'}."
                )
        if not (values and self.options and self.configure):
            return self
        return self.configure(dataclasses.replace(self.options, **values))

    def recipe_options(self, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {name: value} of its own options under one of `recipes`, beside those that are chosen. Raises
        ConfigError if there is no such recipe, or it has another value than a chosen one."""
        if name not in self.recipes:
            there = f"has the recipes {', '.join(self.recipes)}" if self.recipes else "has no recipes"
            advice = "Choose one of them." if self.recipes else "Leave the option out."
            raise errors.ConfigError(f"--recipe={name}: workload {self.name} {there}. {advice}")
        for option, value in self.recipes[name].items():
            if chosen.get(option, value) != value:
                raise errors.ConfigError(
                    f"--recipe={name} and --{option}={chosen[option]} exclude each other: the recipe has "
                    f"--{option}={value}. Give one of them."
                )
        return {**self.recipes[name], **chosen}

    def check_dataset(self, dataset: str) -> None:
        """Raises ConfigError for a --dataset that the workload does not have."""
        if dataset in self.datasets:
            return
        if len(self.datasets) == 1:
            raise errors.ConfigError(
                f"--dataset={dataset}: workload {self.name} knows {self.datasets[0]} only. Leave the option out."
            )
        raise errors.ConfigError(
            f"--dataset={dataset}: workload {self.name} knows {', '.join(self.datasets)}. Choose one of them."
        )

    def config(self, **options) -> config.Config:
        """Makes a Config of these options, of this workload's recipe where they do not override it, and of defaults."""
        return config.Config(**(without_useless(config.Config, self.recipe, options) | options))


def load(path: str, train_dir: str | None = None, run_json: Mapping[str, Any] | None = None) -> Workload:
    """Finds a workload by import path: 'package.module' (its WORKLOAD) or 'package.module:NAME'.

    Args:
      path: the import path.
      train_dir: the run's directory, if there is one yet.
      run_json: its run.json, if that and not the user names the path.

    Raises:
      ConfigError: no such module, or no Workload by that name in it.
      RunError: the module lies in the run, or is not the one that was trained.
    """
    module_name, _, attribute = path.partition(":")
    if not {"", os.getcwd()} & set(sys.path):  # a script's path has its own folder only
        sys.path.append("")
    if module_name == OURS:
        take_ours(attribute or "WORKLOAD")
    try:
        files = _module_files(module_name)
        if train_dir and os.path.isdir(train_dir):
            _refuse_if_in_run(path, files, train_dir)
        if run_json is not None:
            _refuse_if_foreign(path, files[-1] if files else "no file", train_dir, run_json)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise
        script = os.path.relpath(module_name.removesuffix(".py") or ".").replace("/", ".")
        meant = "" if script == module_name or script.startswith(".") else f"Did you mean {script}? "
        raise errors.ConfigError(
            f"--workload={path}: there is no module {error.name or module_name!r} to import. {meant}Give an import "
            "path such as cifar10, my_package.my_module or my_module:NAME, from the current directory or PYTHONPATH."
        ) from None
    workload = getattr(module, attribute or "WORKLOAD", None)
    if not isinstance(workload, Workload):
        raise errors.ConfigError(
            f"--workload={path}: {module_name} has no tower_train.Workload named {attribute or 'WORKLOAD'}. Define one."
        )
    _parse_flags()
    return workload


def take_ours(attribute: str = "WORKLOAD") -> None:
    """Makes `cifar10` our package in this process if the user's file of that name, such as the companion of
    TensorFlow's tutorial, does not speak of this workload."""
    spec = None if OURS in sys.modules else importlib.util.find_spec(OURS)
    ours = pathlib.Path(__file__).parents[1] / OURS / "__init__.py"
    users = spec.origin if spec and spec.has_location else None
    if users is None or not ours.exists() or os.path.samefile(users, ours):
        return
    if not re.search(rf"\b{attribute}\b", pathlib.Path(users).read_text(errors="replace")):
        spec = importlib.util.spec_from_file_location(OURS, ours, submodule_search_locations=[str(ours.parent)])
        assert spec and spec.loader
        sys.modules[OURS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[OURS])


def _parse_flags() -> None:
    """Lets a workload's functions read absl's FLAGS, as a network of TensorFlow 1 does: those of its flags that the
    command line has, else their defaults. Options of the trainer are not known to FLAGS."""
    if not flags.FLAGS.is_parsed():
        try:
            flags.FLAGS(sys.argv, known_only=True)
        except flags.Error as error:
            raise errors.ConfigError(f"a flag of the workload's own: {error}. Correct the command line.") from None


def source_file(path: str | None) -> str | None:
    """Returns the file that holds the workload of an import path; None if there is none."""
    try:
        files = _module_files(path.partition(":")[0]) if path else []
    except ModuleNotFoundError:
        return None
    return os.path.realpath(files[-1]) if files else None


def _module_files(module_name: str) -> list[str]:
    """Returns the files that an import of a module executes, its packages' first, and executes none; raises
    ModuleNotFoundError."""
    files, places, name = [], None, ""
    for part in module_name.split("."):
        name = f"{name}.{part}" if name else part
        if module := sys.modules.get(name):  # which was executed before
            file, places = getattr(module, "__file__", None), getattr(module, "__path__", ())
        else:
            spec = _spec(name, places) if part.isidentifier() else None
            if spec is None:
                raise ModuleNotFoundError(name=name)
            file, places = spec.origin if spec.has_location else None, spec.submodule_search_locations or ()
            if places and not file:  # a folder without __init__.py, of which nothing is executed
                places = importlib.import_module(name).__path__
        files += [file] if file else []
    return files


def _spec(name: str, places: Sequence[str] | None):
    """Finds a module in its package's places, or on the path if these are None; unlike importlib.util.find_spec it
    does not execute the package."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, (finder.find_spec(name, places) for finder in finders)), None)


def _refuse_if_in_run(path: str, files: Sequence[str], train_dir: str) -> None:
    """Raises RunError if a workload lies in the run's directory: a run is data, and none of it is executed."""
    for file in files:
        if any(
            pathlib.Path(real(file)).is_relative_to(real(train_dir)) for real in (os.path.abspath, os.path.realpath)
        ):
            raise errors.RunError(
                f"--workload={path} is {file}, which lies in the run {train_dir}. A run is data, from which nothing "
                "is imported. If you trust that file, copy it to another folder and start there."
            )


def _refuse_if_foreign(path: str, file: str, train_dir: str | None, run_json: Mapping[str, Any]) -> None:
    """Raises RunError for a module that a run names, unless it is the one that was trained there, or is installed: the
    run may be a stranger's, and an import executes whatever the module does."""
    here = pathlib.Path(__file__).parent
    installed = [here, here.parent / OURS, *map(pathlib.Path, [*site.getsitepackages(), site.getusersitepackages()])]
    is_trained = run_json.get("workload_file") == os.path.realpath(file)
    if not is_trained and not any(pathlib.Path(file).is_relative_to(folder) for folder in installed):
        trained = run_json.get("workload_file") or "not noted"
        raise errors.RunError(
            f"--train_dir={train_dir} names the workload {path}, which is {file} here and was {trained} when it "
            f"trained. If you trust that file, give --workload={path}."
        )
