"""The batches of an input_fn for towers."""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.keras_variables import outside_graph
from tower_train.fronts.tf_estimator.arguments import check_input_fn
from tower_train.fronts.tf_estimator.model_fn import call_with_taken, check_parameters
from tower_train.graph.collectives import AllReduce

v1 = tf.compat.v1
_LARGE_BYTES = 2**16


class Inputs:
    """Calls an input_fn in the default graph.

    Each call of `next_batch` makes the tensors of one more batch; a session.run gives each of them another batch of the
    data set, in the order of the calls.

    Args:
      input_fn: the user's function; may take some of the arguments.
      arguments: {name: value}, such as mode, params and config.
      with_labels: whether a pair is (features, labels); if not, its second part is left out.
      num_batches: batches that each session.run takes.
      all_reduce: between the workers, which end together; None for a process by itself.

    Attributes:
      hook: starts the data.
      arrivals: available once the batches are.
      ask_to_stop: the op that ends the input of all workers; None for a process by itself.

    Raises:
      ConfigError: it is no function, or needs other arguments.
      DataError: it returns None, a generator, or a data set made outside of it.
    """

    def __init__(
        self, input_fn: Callable, arguments: dict, with_labels: bool = True, num_batches: int = 1,
        all_reduce: AllReduce | None = None,
    ):  # fmt: skip
        check_input_fn(input_fn)
        check_parameters(input_fn, "input_fn", tuple(arguments))
        with _arrays_outside_the_graph():
            found = call_with_taken(input_fn, **arguments)
        if found is None:
            raise errors.DataError("input_fn returned None; it must return a tf.data.Dataset of (features, labels).")
        if inspect.isgenerator(found):
            raise errors.DataError(
                "input_fn returned a generator; it must return a tf.data.Dataset of (features, labels), such as "
                "tf.data.Dataset.from_generator makes of one."
            )
        self._with_labels, self._taken = with_labels, []
        self._iterator = self._tensors = self._batches = self.ask_to_stop = None
        if isinstance(found, tf.data.Dataset):
            self._iterator = _iterator(found)
        else:
            self._tensors = _as_tensors(found)
        initializers = [self._iterator.initializer] if self._iterator else []
        if all_reduce and all_reduce.num_workers > 1:
            if not self._iterator:
                raise errors.DataError(
                    "input_fn returned tensors; several workers need a tf.data.Dataset, to end together. Return one."
                )
            initializers.append(self._take_together(num_batches, all_reduce))
        self.hook = _Start(initializers)

    def next_batch(self):
        """Returns (features, labels) of one more tower; labels may be None. Raises DataError if the elements are not
        pairs, or there are no batches for several towers."""
        if self._batches is not None:
            return self._split(next(self._batches))
        if self._tensors is not None:
            if self._taken:
                raise errors.DataError(
                    "input_fn returned tensors, of which each tower would get the same. Return a tf.data.Dataset."
                )
            self._taken = [True]
            return self._split(self._tensors)
        with tf.control_dependencies(self._taken):  # else towers would get their batches in any order
            element = self._iterator.get_next()
        self._taken = tf.nest.flatten(element, expand_composites=True)
        return self._split(element)

    def _take_together(self, num_batches: int, all_reduce: AllReduce) -> tf.Operation:
        """Takes the batches of a session.run, which ends in all workers as at the end of a data set if one lacks a
        batch or was asked to stop. Returns a further initializer."""
        asked = v1.get_variable("tower_train/asked_to_stop", [], tf.bool, v1.zeros_initializer(), trainable=False,
                                collections=[v1.GraphKeys.LOCAL_VARIABLES])  # fmt: skip
        self.ask_to_stop = asked.assign(True, read_value=False)
        optionals = []
        for _ in range(num_batches):
            with tf.control_dependencies(self._taken):
                optionals.append(self._iterator.get_next_as_optional())
            self._taken = [optionals[-1].has_value()]
        ready = tf.reduce_all([~asked.read_value(), *(optional.has_value() for optional in optionals)])
        [[share]] = all_reduce.mean([[tf.cast(ready, tf.float32)]], exactly=True)
        nothing = v1.data.make_initializable_iterator(tf.data.Dataset.range(0))
        with tf.control_dependencies([tf.cond(share < 1, lambda: tf.group(nothing.get_next()), tf.no_op)]):
            self._batches = iter([optional.get_value() for optional in optionals])
        return nothing.initializer

    @property
    def arrivals(self) -> list:
        return self._taken

    @property
    def are_endless(self) -> bool:
        """True if the batches are tensors that no queue ends."""
        return self._tensors is not None and not v1.get_collection(v1.GraphKeys.QUEUE_RUNNERS)

    def _split(self, element):
        if not isinstance(element, (tuple, list)):
            return element, None
        if len(element) != 2:
            raise errors.DataError(
                f"input_fn gives elements of {len(element)} parts; they must be (features, labels). Put several "
                "features into a dict."
            )
        return element[0], element[1] if self._with_labels else None


@contextlib.contextmanager
def _arrays_outside_the_graph() -> Iterator[None]:
    """Keeps large arrays of data sets out of the graph within this block: it is written to disk several times, and may
    not exceed 2 GiB."""

    def outside(leaf):
        is_large = isinstance(leaf, np.ndarray) and leaf.nbytes >= _LARGE_BYTES and not leaf.dtype.hasobject
        return outside_graph(leaf) if is_large else leaf

    def changed(make):
        def make_outside(tensors, *args, **kwargs):
            return make(tf.nest.map_structure(outside, tensors), *args, **kwargs)

        return staticmethod(make_outside)

    with contextlib.ExitStack() as stack:
        for name in ("from_tensor_slices", "from_tensors"):
            stack.enter_context(compat.replaced(tf.data.Dataset, name, changed(getattr(tf.data.Dataset, name))))
        yield


def _as_tensors(found):
    """Returns lists, tuples and dicts of tensors, whose keys may be of several types, with tensors for arrays."""
    if type(found) in (list, tuple):
        return type(found)(map(_as_tensors, found))
    if isinstance(found, dict):
        return {key: _as_tensors(value) for key, value in found.items()}
    return tf.convert_to_tensor(found) if isinstance(found, np.ndarray) else found


def _iterator(dataset: tf.data.Dataset):
    try:
        return v1.data.make_initializable_iterator(dataset)
    except ValueError as error:
        if "graph" not in str(error):
            raise
        raise errors.DataError(
            "input_fn returned a data set that was made outside of it. Make it within input_fn, of files or arrays."
        ) from None


class _Start(v1.train.SessionRunHook):
    """Starts the data once variables and tables are initialised."""

    def __init__(self, initializers: list[tf.Operation]):
        self._initializers = initializers

    def after_create_session(self, session, coord):
        session.run(self._initializers)
