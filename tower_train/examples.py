"""Data sets, as workloads give them to the trainer."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.console import enumeration
from tower_train.data.arrays import Arrays, as_arrays, fetcher, is_pair

Tensors = Any  # a tensor, or a tuple or dict of tensors, whose first dimension counts examples
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")


class Weighted(NamedTuple):
    """Labels whose examples count unequally in the loss, [batch, ...] and [batch]: Keras' sample_weight.

    Weighted(labels, weights) may stand wherever labels do. The loss is the mean over the batch of weight times loss, so
    the sum is divided by the number of examples, not by the weights' sum. Metrics count examples equally.
    """

    labels: Tensors
    weights: Any = None

    @classmethod
    def of(cls, labels: "Tensors | Weighted") -> "Weighted":
        return labels if isinstance(labels, cls) else cls(labels)


class Mixed(NamedTuple):
    """Labels of examples that are mixed of two: the loss is the sum of both, whose weights add up to 1."""

    first: Weighted
    second: Weighted


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """The trainer's request for examples of a workload."""

    split: str  # 'train', 'test', or 'validation' if the workload lists it in `splits`
    dataset: str = "auto"
    data_dir: str | None = None  # None: not given
    seed: int = 0
    validation_fraction: float = 0.0  # share of the training examples to set aside for validation


@dataclasses.dataclass(frozen=True)
class Examples:
    """A data set, whose examples are fetched by index or come in their own order."""

    name: str  # of the data, for logs and run.json
    num_examples: int  # number of examples; indices run from 0 to num_examples - 1
    # called inside a graph; may create tensors (evaluated once, when the stream starts) and returns `fetch(indices)`,
    # which maps an int64 tensor [batch] to (features, labels), tensors whose first dimension is batch. None if there
    # is `elements`
    open: Callable[[], Callable[[tf.Tensor], tuple[Tensors, Tensors]]] | None
    fingerprint: str = ""  # changes when the data changes; a run is resumed only on the data it was started on
    class_names: tuple[str, ...] = ()  # names of labels 0, 1, ...; empty if labels are not classes
    notice: str | None = None  # remark for the user at every start, such as what is left out; or None
    dataset: str = "auto"  # the --dataset that names exactly this data, if 'auto' chose it
    # steps whose examples are fetched at the same time; None: as the cores can, or two of elements
    parallel_steps: int | None = None
    # called inside a graph, returns a tf.data.Dataset of (features, label), one example each; see data/tf_data.py
    elements: Callable[[], tf.data.Dataset] | None = None
    # finds what is wrong with the examples fetched last, after a failure: one line for a message, or None
    fault: Callable[[], str | None] = lambda: None
    # integers [num_examples], the classes of all examples, or 0 and 1 [num_examples, classes] of several at once, if
    # they are at hand: checked for mistakes, and counted by --class_weight=balanced
    labels: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.num_examples < 1:
            raise errors.DataError(f"{self.name}: holds no examples ({self.num_examples}). At least one is needed.")
        if self.labels is not None:
            self.check_labels(self.labels)

    @property
    def class_counts(self) -> list[int] | None:
        """Returns the number of examples of each class, if classes have names and all labels are at hand; else None."""
        if self.labels is None or not self.class_names:
            return None
        return count_classes(self.labels, len(self.class_names)).tolist()

    def check_labels(self, labels: np.ndarray) -> None:
        """Raises DataError if there are class_names and labels are neither integers [n] below their number, nor 0 and 1
        of shape [n, classes]."""
        num_classes = len(self.class_names)
        if not num_classes or _are_of_several(labels, self.class_names):
            return
        if not _are_classes(labels):
            raise errors.DataError(
                f"{self.name}: got labels {errors.described(labels)}; with class_names they must be whole numbers of "
                f"shape (n,), or 0 and 1 of shape (n, {num_classes}) of several classes at once. Leave class_names out "
                "if they are no classes."
            )
        wrong = (labels < 0) | (labels >= num_classes)
        if wrong.any():
            first = np.argmax(wrong)
            raise errors.DataError(
                f"{self.name}: there is a label {labels[first]}; labels are 0 to {num_classes - 1}, since there are "
                f"{num_classes} class_names. It is label number {first}. Mend the labels or the names."
            )

    def check_same_classes(self, of: str, class_names: Sequence[str]) -> None:
        """Raises DataError if a label names another class than in the examples called `of`."""
        for i, (here, there) in enumerate(itertools.zip_longest(self.class_names, class_names)):
            if here != there:
                raise errors.DataError(
                    f"{self.name}: label {i} is {'no class' if here is None else here}, and in {of} "
                    f"{'no class' if there is None else there}. Give both the same class_names, in the same order."
                )

    def opened(self) -> Callable[[tf.Tensor], tuple[Tensors, Tensors]]:
        """Calls `open` in the current graph; returns `fetch`. GraphError if either returns what it may not."""
        assert self.open, "of elements: opened_elements"
        fetch, pair = self.open(), "(features, labels), tensors [batch, ...]"
        if not callable(fetch):
            raise errors.returned(self.name, "open", fetch, f"a function fetch(indices) -> {pair}")

        def checked(indices: tf.Tensor) -> tuple[Tensors, Tensors]:
            batch = fetch(indices)
            if not is_pair(batch) or not all(map(tf.is_tensor, tf.nest.flatten(batch))):
                raise errors.returned(self.name, "fetch", batch, pair)
            check_dense(self.name, batch)
            return batch

        return checked

    def opened_elements(self) -> tf.data.Dataset:
        """Calls `elements` in the current graph; GraphError if it returns what it may not."""
        assert self.elements, "of examples by index: opened"
        dataset = self.elements()
        wanted = "a tf.data.Dataset of (features, label)"
        if not isinstance(dataset, tf.data.Dataset):
            raise errors.returned(self.name, "elements", dataset, wanted)
        if not is_pair(dataset.element_spec):
            raise errors.returned(self.name, "elements", dataset.element_spec, f"{wanted}, not of these")
        check_dense(self.name, dataset.element_spec)
        return dataset

    def symbolic_batch(self) -> tuple[Tensors, Tensors]:
        """Returns (features, labels) of one example in the current graph, for their shapes and dtypes."""
        if self.open:
            return self.opened()(tf.zeros([1], tf.int64))
        return tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, tf.TensorShape([1]).concatenate(spec.shape)),
            self.opened_elements().element_spec,
        )

    def first(self, count: int) -> tuple[Tensors, Tensors]:
        """Reads the first examples, by index or in their own order, in a separate graph and session: (features,
        labels), arrays [count, ...], or all examples if there are fewer."""
        count = min(count, self.num_examples)
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            if self.elements:
                batches = in_fixed_order(self.opened_elements().take(count)).batch(count)
                iterator = tf.compat.v1.data.make_initializable_iterator(batches)
                prepare, fetches = iterator.initializer, iterator.get_next()
            else:
                prepare, fetches = tf.no_op(), self.opened()(tf.range(count, dtype=tf.int64))
            # Its own threads: those of another session may all wait for this one.
            session_config = tf.compat.v1.ConfigProto(device_count={"GPU": 0}, use_per_session_threads=True)
            with tf.compat.v1.Session(config=session_config) as session:
                session.run([prepare, tf.compat.v1.tables_initializer()])
                return session.run(fetches)

    def sample(self, count: int) -> "Examples":
        """Returns some of these examples, the same ones each time; all if there are no more than count.

        They are chosen at random, or are the first if the examples come in their own order.
        """
        count = min(count, self.num_examples)
        if self.elements:
            return dataclasses.replace(
                self,
                num_examples=count,
                elements=lambda: self.opened_elements().take(count),
                labels=None,
            )
        return self.subset(np.sort(np.random.default_rng(0).choice(self.num_examples, count, replace=False)))

    def set_aside(self, fraction: float, seed: int) -> tuple["Examples", "Examples"]:
        """Returns (the rest, the examples set aside), a seeded choice that depends on nothing else.

        Raises:
          ConfigError: the examples come in their own order, or the fraction leaves none on one side.
        """
        count = round(fraction * self.num_examples)
        if self.elements or not 0 < count < self.num_examples:
            why = "they come in an order of their own" if self.elements else f"there are {self.num_examples} of them"
            raise errors.ConfigError(
                f"--validation_fraction={fraction:g}: {self.name} cannot be divided: {why}. Leave the option out"
                + (", and let the workload itself give validation examples." if self.elements else ".")
            )
        order = np.random.default_rng(seed).permutation(self.num_examples)
        kept, aside = (self.subset(np.sort(chosen)) for chosen in (order[count:], order[:count]))
        return (
            dataclasses.replace(kept, fingerprint=f"{self.fingerprint} less {fraction:g}"),
            dataclasses.replace(aside, name=f"{self.name}, validation"),
        )

    def subset(self, chosen: np.ndarray) -> "Examples":
        """Returns the examples at these indices, int64 [count]."""

        def open_subset():
            fetch = self.opened()
            return lambda indices: fetch(tf.gather(tf.constant(chosen, tf.int64), indices))

        labels = None if self.labels is None else self.labels[chosen]
        return dataclasses.replace(self, num_examples=len(chosen), open=open_subset, labels=labels)

    @classmethod
    def from_arrays(
        cls, name: str, features: Arrays, labels: Arrays, class_names: Sequence[str] = (), weights=None
    ) -> "Examples":
        """Makes examples of numpy arrays of equal length.

        Args:
          name: of the data.
          features: [n, ...], or a dictionary of such arrays, of numbers or texts.
          labels: as features; with class_names integers [n], each below the number of names, or such names; or [n,
            classes] of 0 and 1, of several classes at once. Texts without class_names are the names, sorted.
          class_names: names of the labels 0, 1, ...
          weights: [n], how much each example counts in the loss, see Weighted.

        Raises:
          DataError: the lengths differ or are 0, there are class_names and labels that are no classes, or an array
            holds what no tensor does.
        """
        features, labels = as_arrays(features, f"{name}: features"), as_arrays(labels, f"{name}: labels")
        class_names = [each.decode() if isinstance(each, bytes) else str(each) for each in class_names]
        if isinstance(labels, np.ndarray) and labels.dtype.kind == "S" and labels.ndim == 1 and len(labels):
            labels, class_names = _as_numbers(name, labels, class_names)
        batch = (features, labels if weights is None else Weighted(labels, np.asarray(weights)))
        lengths = {array.shape[:1] for array in tf.nest.flatten(batch)}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            shapes = [tf.nest.map_structure(lambda array: array.shape, each) for each in batch]
            raise errors.DataError(
                f"{name}: got features of shape {shapes[0]} and labels of shape {shapes[1]}; "
                "all need the same first dimension, at least 1."
            )

        digest = hashlib.sha256()
        for names in (sorted(each) for each in (features, labels) if isinstance(each, dict)):
            digest.update(repr(names).encode())
        for array in tf.nest.flatten(batch):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        if class_names and _are_of_several(labels, class_names) and (labels.sum(axis=1) == 1).all():
            raise errors.DataError(
                f"{name}: labels are one-hot, of shape {labels.shape}, each of one class. Give their numbers: "
                "labels.argmax(axis=1)."
            )
        classes = labels if class_names or _are_classes(labels) else None
        fetch, [(length,)] = fetcher(*batch), lengths
        return cls(name, length, lambda: fetch, digest.hexdigest()[:16], tuple(class_names), labels=classes)


def check_dense(name: str, batch) -> None:
    """Raises DataError for sparse or ragged tensors in a structure of tensors or their specifications."""
    for leaf in tf.nest.flatten(batch):
        for kind in ("Sparse", "Ragged"):
            if type(leaf).__name__ in (f"{kind}Tensor", f"{kind}TensorSpec"):
                raise errors.DataError(
                    f"{name}: there is a {kind.lower()} tensor, {leaf.dtype.name} {leaf.shape}, and towers take dense "
                    "ones. Give all examples one shape: tf.io.FixedLenFeature instead of VarLenFeature, or "
                    "tf.sparse.to_dense, or to_tensor(shape=...) of a ragged one, and padding."
                )


def _as_numbers(name: str, labels: np.ndarray, class_names: list[str]) -> tuple[Any, list[str]]:
    """Returns classes, int64 [n], of their names, and all names; DataError for other names than class_names."""
    unique, classes = np.unique(labels, return_inverse=True)
    there = [each.decode(errors="replace") for each in unique]
    if class_names:
        if unknown := set(there) - set(class_names):
            raise errors.DataError(
                f"{name}: there is a label {min(unknown)!r}, which is none of the class_names "
                f"({enumeration(class_names, 5)}). Mend the labels or the names."
            )
        numbers_by_name = {class_name: number for number, class_name in enumerate(class_names)}
        return np.array([numbers_by_name[each] for each in there])[classes], class_names
    try:
        numbers = np.array(there, float)
    except ValueError:
        return classes, there
    raise errors.DataError(
        f"{name}: labels are numbers as texts, such as {there[0]!r} ({numbers[0]:g}). If they are numbers, give "
        "labels.astype(float); if they are names of classes, give class_names too."
    )


def count_classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns the number of examples of each class, [classes]; labels are [n], or [n, classes] of several at once."""
    return np.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(axis=0, dtype=np.int64)


def _are_of_several(labels: np.ndarray, class_names: Sequence[str]) -> bool:
    """Returns whether labels are [n, classes] of 0 and 1."""
    is_number = isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf"
    return is_number and labels.shape[1:] == (len(class_names),) and bool(np.isin(labels, (0, 1)).all())


def _are_classes(labels: Arrays) -> bool:
    return isinstance(labels, np.ndarray) and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)


def in_fixed_order(elements: tf.data.Dataset) -> tf.data.Dataset:
    """Makes parallel parts of a dataset deterministic, unless they are explicitly told not to be."""
    options = tf.data.Options()
    options.deterministic = True
    return elements.with_options(options)
