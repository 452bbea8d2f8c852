"""A training task as a user brings it to the trainer: examples, inference, loss, metrics.

A workload is one frozen record of functions. They are called for each tower while the graph is built, so they must
create variables through `tf.compat.v1.get_variable` only (tower 0 creates them, later towers reuse them) and must not
depend on which tower they are called for.

    WORKLOAD = Workload(name="mine", examples=load, inference=network, loss=softmax_cross_entropy)
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tower_train import config, errors
from tower_train.examples import DataRequest, Examples, Tensors
from tower_train.options import Options, declare


class Draws(Protocol):
    """Random numbers of one batch: a function of (seed, position), never of the batch, the tower or the time."""

    positions: tf.Tensor  # int64 [batch], consecutive places in the endless stream of examples
    epochs: tf.Tensor  # int64 [batch], positions // num_examples

    def uniform(self, name: str, count: int) -> tf.Tensor:
        """Returns float32 [batch, count], uniform in [0, 1). Another name gives independent numbers."""

    def of_example(self, name: str, count: int) -> tf.Tensor:
        """Returns numbers as `uniform`, but a function of (seed, name, the example's index): the same in every epoch.

        Raises:
          GraphError: the examples come in an order of their own, in which none has an index.
        """


def classification_metrics(logits: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
    """Computes per-example precision @ 1, and @ 5 if there are more than five classes.

    Args:
      logits: floating point [batch, classes].
      labels: integer [batch].

    Returns:
      {metric name: float32 [batch] of zeros and ones}. A class whose logit equals the right one's, or either of which
      is NaN, counts as ranked above it.
    """
    right = tf.gather(logits, _classes(labels), batch_dims=1)[:, tf.newaxis]
    # Not tf.math.in_top_k: it counts a tie as a hit, and so a network that gives every class the same as perfect.
    # Nor the classes that are not below: TensorFlow turns `not <` into `>=`, which is false where a logit is NaN.
    rank = logits.shape[-1] - tf.reduce_sum(tf.cast(logits < right, tf.int32), axis=1)
    ranks = [1, 5] if logits.shape[-1] > 5 else [1]
    return {f"precision @ {k}": tf.cast(rank <= k, tf.float32) for k in ranks}


def softmax_cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float = 0.0) -> tf.Tensor:
    """Returns the mean over the batch of the cross-entropy between integer labels [batch] and logits [batch, classes].

    With label_smoothing e, a label is worth 1 - e, and e is spread evenly over all classes, the right one included
    (Szegedy et al. 2016, "Rethinking the Inception architecture", section 7).
    """
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=_classes(labels), logits=logits)
    if label_smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    return tf.reduce_mean(loss)


def _classes(labels: tf.Tensor) -> tf.Tensor:
    """Labels of any integer type as those that TensorFlow takes for classes.

    Raises:
      DataError: they are no integers [batch].
    """
    labels = tf.convert_to_tensor(labels)
    if not labels.dtype.is_integer or labels.shape.rank not in (1, None):
        raise errors.DataError(
            f"labels are {labels.dtype.name} {labels.shape.as_list()} in a batch; the workload's loss or metrics, or "
            "those by default, take whole numbers [batch], the classes from 0. Give integers of shape (n,), or the "
            "workload a loss and metrics of its own."
        )
    return labels if labels.dtype in (tf.int32, tf.int64) else tf.cast(labels, tf.int64)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training task.

    Attributes:
      name: names the default train_dir.
      examples: DataRequest -> Examples.
      inference: (features, training) -> outputs [batch, ...]. Weight decay is declared as a variable's `regularizer=`.
      inference_for: Examples -> inference, for a network that depends on the data, such as on the number of classes, or
        that begins with values made from it (initializers.FromExamples); takes the place of `inference`. It gets the
        examples that are trained on or, in evaluation and export, the test examples.
      loss: (outputs, labels) -> scalar, the mean over the batch it is given.
      metrics: (outputs, labels) -> {name: float [batch]}; evaluation averages each over all examples.
      distort: (features, draws) -> features, the random preprocessing of training examples; None for none.
      prepare: features -> features, the preprocessing for evaluation, and for training if distort is None.
      views: prepared features -> (weight, features) of several views of each example, such as mirror images; evaluation
        and export take the weighted mean of the outputs over them. The weights sum to 1. None: one, as it is prepared.
      datasets: what --dataset may be for this workload, and so `DataRequest.dataset`.
      options: the values of its own options, a record of a subclass of Options; None if it has none.
      configure: options -> Workload, the same workload with other values of its options.
      recipe: the values of the trainer's options that suit it, unless the user gives others.
      recipes: {name: values of its own options}, for --recipe=NAME; each makes a workload with a `recipe` of its own.
    """

    name: str
    examples: Callable[[DataRequest], Examples]
    inference: Callable[[Tensors, bool], Tensors] | None
    loss: Callable[[Tensors, Tensors], tf.Tensor] = softmax_cross_entropy
    metrics: Callable[[Tensors, Tensors], Mapping[str, tf.Tensor]] = classification_metrics
    distort: Callable[[Tensors, Draws], Tensors] | None = None
    prepare: Callable[[Tensors], Tensors] | None = None
    views: Callable[[Tensors], Sequence[tuple[float, Tensors]]] | None = None
    datasets: tuple[str, ...] = ("auto",)
    inference_for: Callable[[Examples], Callable[[Tensors, bool], Tensors]] | None = None
    options: Options | None = None
    configure: Callable[[Any], "Workload"] | None = None
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    recipes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    def for_examples(self, examples: Examples) -> "Workload":
        """Returns this workload with the network for these examples."""
        return dataclasses.replace(self, inference=self.inference_for(examples)) if self.inference_for else self

    def with_options(self, values: Mapping[str, Any]) -> "Workload":
        """Returns this workload with some of its own options changed, by name.

        Raises:
          ConfigError: an option that it does not have, or a value that cannot be.
        """
        there = [field.name for field in dataclasses.fields(self.options)] if self.options else []
        for name in values:
            if name not in there:
                raise errors.ConfigError(
                    f"workload {self.name} has no option {name!r}. Its options are: {', '.join(there) or 'none'}."
                )
        return self.configure(dataclasses.replace(self.options, **values)) if values else self

    def recipe_options(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {name: value} of its own options under one of `recipes`, beside those that are given.

        Raises:
          ConfigError: no such recipe, or one of another value than a given one.
        """
        if name not in self.recipes:
            there = f"has the recipes {', '.join(self.recipes)}" if self.recipes else "has no recipes"
            advice = "Choose one of them." if self.recipes else "Leave the option out."
            raise errors.ConfigError(f"--recipe={name}: workload {self.name} {there}. {advice}")
        for option, value in self.recipes[name].items():
            if given.get(option, value) != value:
                raise errors.ConfigError(
                    f"--recipe={name} and --{option}={given[option]} exclude each other: the recipe has "
                    f"--{option}={value}. Give one of them."
                )
        return {**self.recipes[name], **given}

    def check_dataset(self, dataset: str) -> None:
        """Raises ConfigError for a --dataset that it does not have."""
        if dataset in self.datasets:
            return
        if len(self.datasets) == 1:
            raise errors.ConfigError(
                f"--dataset={dataset}: workload {self.name} knows {self.datasets[0]} only. Leave the option out."
            )
        raise errors.ConfigError(
            f"--dataset={dataset}: workload {self.name} knows {', '.join(self.datasets)}. Choose one of them."
        )

    def config(self, **given) -> config.Config:
        """Makes a Config of the given options, then of this workload's recipe, as far as it is of use beside them, then
        of the trainer's defaults."""
        return config.Config(**(declare.without_useless(config.Config, self.recipe, given) | given))


def load(path: str) -> Workload:
    """Finds a workload by import path: 'package.module' (its WORKLOAD) or 'package.module:NAME'.

    Raises:
      ConfigError: no such module, or no Workload by that name in it.
    """
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        if not all(map(str.isidentifier, module_name.split("."))):
            raise ModuleNotFoundError(name=module_name)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise
        ours = f"tower_train.workloads.{module_name}"
        is_ours = module_name.isidentifier() and importlib.util.find_spec(ours)
        meant = f" Did you mean {ours}?" if is_ours else ""
        raise errors.ConfigError(
            f"--workload={path}: there is no module {error.name!r} to import.{meant} Give an import path such as "
            "cifar10, my_package.my_module or my_module:NAME, importable from the current directory or PYTHONPATH."
        ) from None
    workload = getattr(module, attribute or "WORKLOAD", None)
    if not isinstance(workload, Workload):
        raise errors.ConfigError(
            f"--workload={path}: {module_name} has no tower_train.Workload named {attribute or 'WORKLOAD'}. Define one."
        )
    return workload
