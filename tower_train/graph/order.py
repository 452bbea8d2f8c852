"""The order of examples by index: passes over all of them, or from an epoch on over those that are hard.

Hard are the examples with the greatest losses when they were last trained on. After Jiang et al. 2019 ("Accelerating
deep learning by focusing on the biggest losers", arXiv 1910.00762), with the last loss instead of a forward pass, as in
Qin et al. 2024 ("InfoBatch", arXiv 2303.04947). The examples of a pass are chosen once, at the end of a step; their
order is a function of the position. So a resumed run trains what a whole one trains, and several towers what one
trains, unless their losses differ: with batch normalisation by tower, or by rounding alone.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tower_train import errors
from tower_train.examples import Examples, Tensors, Weighted
from tower_train.graph.draws import shuffled
from tower_train.measures import softmax_cross_entropies, softmax_cross_entropy
from tower_train.options import rules
from tower_train.workload import Workload

v1 = tf.compat.v1


class Choice(NamedTuple):
    """The choice of a pass's examples, made between two steps."""

    pass_at: Callable[[int], int]  # position -> the number of its pass
    choose: tf.Tensor  # chooses the examples of the next step's pass, if that is due; bool scalar, whether it was


class AllExamples:
    """Passes over all examples; each is shuffled, unless they come in an order of their own."""

    def __init__(self, examples: Examples, seed: int):
        self._num_examples, self._seed = examples.num_examples, None if examples.elements else seed

    def locate(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns (passes before, index of the example or None) at int64 [batch] positions. A pass holds each example
        once, in an order of its own; indices are None for examples in an order of their own."""
        epochs = positions // self._num_examples
        if self._seed is None:
            return epochs, None
        size = tf.fill(tf.shape(positions), np.int64(self._num_examples))
        return epochs, shuffled(positions % self._num_examples, size, epochs, self._seed)

    def note_losses(self, outputs: Tensors, labels: Tensors) -> None:
        """Takes the losses of a tower's examples; called within the tower."""

    def prepare_update(
        self, first: tf.Tensor, offsets: np.ndarray, gather: Callable
    ) -> list[Callable[[], tf.Operation]]:
        """Returns functions that make an update's ops, in a step whose examples are at `first` + `offsets`. gather:
        this worker's rows -> those of all workers."""
        return []

    def choice(self, position: tf.Tensor) -> Choice | None:
        """Returns the choice before the step that begins at this position; None if there is nothing to choose."""
        return None


def choose_order(
    keep_hardest: str | None, workload: Workload, examples: Examples, seed: int, batch: int
) -> AllExamples:
    """Returns the order of a training. keep_hardest: the option; batch: of a step, over all workers. Raises ConfigError
    if the examples or their losses do not allow a choice."""
    if keep_hardest is None:
        return AllExamples(examples, seed)
    epoch, share = rules.parse_hardest(keep_hardest)
    size = max(1, round(share * examples.num_examples))
    _check(keep_hardest, workload, examples, size, batch)
    losses = functools.partial(softmax_cross_entropies, **getattr(workload.loss, "keywords", {}))
    return HardExamples(losses, examples.num_examples, epoch, size, seed, batch)


class HardExamples(AllExamples):
    """The choice of examples from an epoch on.

    The first `begin` positions are passes over all n examples. Passes of `size` examples follow: pass k begins at
    position begin + k * size. It is chosen between two steps, as late as possible; the stream then begins there again.
    """

    def __init__(self, losses: Callable, num_examples: int, epoch: float, size: int, seed: int, batch: int):
        """Creates the variables, which checkpoints hold: the losses, and the examples of the present pass and the next.

        losses: (outputs, labels) -> [batch, ...]; num_examples: all; epoch: the first with passes of `size` examples.
        """
        # begin, size: in positions
        self.begin, self._first_epoch, self.size = round(epoch * num_examples), math.ceil(epoch), size
        self._num_examples, self._batch, self._seed, self._loss_function = num_examples, batch, seed, losses
        create = functools.partial(v1.get_variable, trainable=False)
        with v1.variable_scope("hard_examples"):
            unknown = v1.constant_initializer(tf.float64.max)  # the hardest, so that they come soon
            self._losses = create("losses", [num_examples], tf.float64, unknown)
        # by the option's values: a run that goes on with others must choose anew
        with v1.variable_scope(f"hard_examples/{self.begin}_{size}"):
            self._chosen = create("chosen", [2, size], tf.int64, v1.zeros_initializer())
            self._second = create("pass_of_second_row", [], tf.int64, v1.constant_initializer(-1))
        self._tower_losses = []  # losses [tower batch] of the step
        # Read outside of input functions: the stream keeps the choice that it has begun with.
        self._rows, self._pass_of_second = self._chosen.read_value(), self._second.read_value()

    def pass_at(self, position):
        """Returns the number of the pass that has a position, an integer or int64 tensor; below 0 before the first."""
        return (position - self.begin) // self.size

    def locate(self, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (passes over the examples before, index of the example) at int64 [batch] positions."""
        is_chosen = positions >= self.begin
        size = tf.where(is_chosen, np.int64(self.size), np.int64(self._num_examples))
        since = positions - tf.where(is_chosen, np.int64(self.begin), np.int64(0))
        epochs = since // size + tf.where(is_chosen, np.int64(self._first_epoch), np.int64(0))
        places = shuffled(since % size, size, epochs, self._seed)
        rows = tf.clip_by_value(self.pass_at(positions) - self._pass_of_second + 1, 0, 1)
        chosen = tf.gather_nd(self._rows, tf.stack([rows, tf.minimum(places, np.int64(self.size - 1))], axis=1))
        return epochs, tf.where(is_chosen, chosen, places)

    def note_losses(self, outputs: Tensors, labels: Tensors) -> None:
        labels, weights = Weighted.of(labels)
        losses = tf.cast(self._loss_function(outputs, labels), tf.float64)
        losses = tf.reduce_mean(losses, list(range(1, losses.shape.rank)))
        self._tower_losses.append(losses if weights is None else losses * tf.cast(weights, tf.float64))

    def prepare_update(
        self, first: tf.Tensor, offsets: np.ndarray, gather: Callable
    ) -> list[Callable[[], tf.Operation]]:
        losses = gather(tf.concat(self._tower_losses, 0))
        with v1.name_scope("hard_examples"):  # found while the towers compute
            _, indices = self.locate(first + offsets)
            examples, places = tf.unique(indices)

        def note() -> tf.Operation:
            with v1.name_scope("hard_examples"):
                # an example may be in the batch twice, at the end of a pass and the beginning of the next
                greatest = tf.math.unsorted_segment_max(losses, places, tf.size(examples))
                return tf.raw_ops.ResourceScatterUpdate(
                    resource=self._losses.handle, indices=examples, updates=greatest
                )

        return [note]

    def choice(self, position: tf.Tensor) -> Choice:
        coming = self.pass_at(position + self._batch - 1)

        def chosen() -> tf.Tensor:
            # sorted, so that the order within a pass does not depend on ranks, which roundings change
            hardest = tf.sort(tf.cast(tf.math.top_k(self._losses, self.size).indices, tf.int64))
            # the first row holds the pass before, if that was chosen
            rows = tf.stack([tf.where(tf.equal(coming, second + 1), self._rows[1], hardest), hardest])
            with tf.control_dependencies([self._chosen.assign(rows), self._second.assign(coming)]):
                return tf.constant(True)

        second = self._pass_of_second
        with v1.name_scope("hard_examples"), tf.control_dependencies([self._rows, second]):
            is_due = (coming >= 0) & (coming > second)
            return Choice(self.pass_at, tf.cond(is_due, chosen, lambda: tf.constant(False)))


def _check(text: str, workload: Workload, examples: Examples, size: int, batch: int) -> None:
    given = f"--keep_hardest={text}"
    if getattr(workload.loss, "func", workload.loss) is not softmax_cross_entropy:
        raise errors.ConfigError(
            f"{given}: workload {workload.name} has a loss of its own, of which the losses of single examples are not "
            "known. Leave the option out."
        )
    if workload.mix:
        raise errors.ConfigError(
            f"{given}: workload {workload.name} mixes examples, so that none has a loss of its own. Leave one of the "
            "two out."
        )
    if examples.elements:
        raise errors.ConfigError(
            f"{given}: {examples.name} comes in an order of its own. The option is for examples by index."
        )
    if batch > size:
        raise errors.ConfigError(
            f"{given} keeps {size} of {examples.num_examples} examples, fewer than the {batch} of a "
            "step. Keep more, or train on smaller batches."
        )
