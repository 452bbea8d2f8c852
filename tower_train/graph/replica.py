"""Replicas: each is one copy of the variables, on the host or on each tower's device.

A replica goes through a step by itself: its towers' gradients, their mean, the mean over all replicas, regularizers,
update. All do the same arithmetic on the same means, so the copies stay the same to the bit.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Tensors
from tower_train.graph import collected, gradients, xla
from tower_train.graph.collectives import AllReduce
from tower_train.graph.context import Context, Statistic
from tower_train.graph.gradients import GradientsAndVariables
from tower_train.graph.loss_scale import LossScale
from tower_train.graph.variables import Variables

v1 = tf.compat.v1
# what changes mean gradients, in this order: (gradients, variable -> its name in a checkpoint) -> gradients
Changes = Sequence[Callable[[GradientsAndVariables, Callable[[tf.Variable], str]], GradientsAndVariables]]


class BuiltTower(NamedTuple):
    """The results of a tower."""

    context: Context  # with the statistics that its layers noted
    loss: tf.Tensor  # scalar
    gradients: GradientsAndVariables  # each with the original variable

    @property
    def last(self) -> list[tf.Operation]:
        """The operations after which it is done."""
        # the backward pass ends the tower, in no fixed order of variables
        return [gradient.op for gradient, _ in self.gradients if gradient is not None]


class Mean(NamedTuple):
    """The means over all towers of all workers."""

    loss: tf.Tensor  # with the regularizers, scalar
    data_loss: tf.Tensor  # without
    gradients: GradientsAndVariables  # the first replica's; the others have the same
    before_update: list[tf.Operation]  # each step must run these, before the weights change
    stopping: tf.Tensor | None  # scalar, above 0 once a worker has asked all to end; None for one worker
    ask_to_stop: tf.Operation | None  # this worker asks by it


class Replica:
    """A copy of the variables, its towers and their means."""

    def __init__(self, variables: Variables, is_compiled: bool = False):
        self.variables = variables  # the copy
        self.is_compiled = is_compiled  # whether its operations are for XLA
        self.towers: list[BuiltTower] = []  # on these variables, in the order of their batches
        # means over all towers of all workers, from `average` on:
        self.mean_grads: GradientsAndVariables = []  # each with this copy's variable
        self.moving: list[Statistic] = []  # of batch statistics, for this copy's variables
        self._contained = []  # the values of regularizers that the towers' losses contain

    def add(self, context: Context, loss: tf.Tensor, scale: LossScale) -> None:
        """Adds the tower that is being built: its loss, with those that its layers collected, and its gradients."""
        loss, contained = collected.whole_loss(loss, self.variables.decays)
        self._contained += contained
        context.draws.close()  # the backward pass may not draw: recomputed layers would draw other numbers
        self.towers.append(BuiltTower(context, loss, scale.gradients(self.variables.gradients, loss)))

    def after_previous_tower(self, batch: Tensors) -> Tensors:
        """Delays a batch until the previous tower on its device is done."""
        devices = sum(not tower.context.turn for tower in self.towers)  # one first turn on each
        before = self.towers[-devices]

        def delayed(tensor):
            with tf.device(tensor.device):  # else the copy would be on the host, and cross again
                return tf.identity(tensor)

        with tf.control_dependencies(before.last):
            return tf.nest.map_structure(delayed, batch)

    @contextlib.contextmanager
    def here(self, part: str = "step") -> Iterator[None]:
        """Places operations where its variables are. part: as for xla.compiled."""
        with tf.device(self.variables.device), xla.compiled(self.is_compiled, self.variables.device, part):
            yield

    def average_gradients(self) -> GradientsAndVariables:
        """Returns the mean gradients over its towers, each with the original variable."""
        with self.here():
            # on the device first, so that it sends one gradient a variable, however many batches it takes
            return gradients.average_gradients([tower.gradients for tower in self.towers])

    def average_values(self, others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the mean loss over its towers, `others`, and the mean statistics; these travel together."""
        with self.here(), v1.name_scope("average_values"):
            values_of_towers = [
                # in one order in all towers, which _check_alike has made sure of
                [tower.loss, *others, *(each.value for each in tower.context.statistics if each.is_mean)]
                for tower in self.towers
            ]
            return [tf.add_n(values) / len(values) for values in zip(*values_of_towers, strict=True)]

    def receive(
        self, mean_grads: GradientsAndVariables, statistics: Sequence[tf.Tensor], changes: Changes
    ) -> tf.Tensor | float:
        """Takes the means over all replicas: gradients with the originals, and the values of a tower's statistics. Adds
        the regularizers' gradients, once a variable, and changes the sums. Returns the regularizers' sum, a scalar."""
        self.moving = self._once_a_variable(statistics)
        grads = [(grad, self.variables.local_copy(original)) for grad, original in mean_grads]
        # those within a tower's loss would count twice; by `is`, as == between tensors makes an operation
        decays = [decay for decay in self.variables.decays if not any(decay is each for each in self._contained)]
        with self.here():
            regularization, self.mean_grads = gradients.add_regularizers(grads, decays)
            for change in changes:
                self.mean_grads = change(self.mean_grads, self.variables.canonical_name)
        return regularization

    def _once_a_variable(self, values: Sequence[tf.Tensor]) -> list[Statistic]:
        """Returns one statistic per moving variable, with the mean of its values."""
        # a layer that is called twice, as on two views, moves its statistics once, by the mean of both
        by_variable = {}
        for each, value in zip(self.towers[0].context.statistics, values, strict=True):
            by_variable.setdefault(each.moving.ref(), []).append(each._replace(value=value))
        return [
            calls[0]._replace(value=tf.add_n([each.value for each in calls]) / len(calls))
            if len(calls) > 1 and calls[0].is_mean
            else calls[0]
            for calls in by_variable.values()
        ]


def make_replicas(devices: Sequence[str], is_compiled: bool) -> list[Replica]:
    """Makes a replica on each device."""
    originals = Variables(devices[0])  # with the names of checkpoints, which tell of no copy
    copies = [Variables(device, i, originals) for i, device in enumerate(devices[1:], 1)]
    return [Replica(variables, is_compiled) for variables in (originals, *copies)]


def average(replicas: Sequence[Replica], all_reduce: AllReduce, changes: Changes) -> Mean:
    """Gives each replica the mean gradients, loss and statistics over all towers of all workers.

    Raises GraphError if there are no gradients, or towers have different variables, gradients or statistics.
    """
    if not gradients.without_unused([tower.gradients for tower in built_towers(replicas)])[0]:
        raise errors.GraphError(
            "The network trains nothing: its loss depends on no variable. Get some with tf.compat.v1.get_variable."
        )
    _check_alike(replicas)  # else means by place would mix up layers
    # workers end after the same step, else the others would wait for ever: the request is a mean too
    votes, ask_to_stop = _stop_request(replicas[0].towers[0].loss.dtype) if all_reduce.num_workers > 1 else ([], None)
    local = [replica.average_gradients() for replica in replicas]
    originals = [variable for _, variable in local[0]]
    means = all_reduce.mean([[grad for grad, _ in grads] for grads in local])
    # Apart from the gradients, as these may be large and the loss may come in another dtype; votes travel with it.
    values = all_reduce.mean([replica.average_values(votes) for replica in replicas])
    first, regularization = replicas[0], []
    for replica, grads, (_, *rest) in zip(replicas, means, values, strict=True):
        averaged = iter(rest[len(votes) :])
        # integers are tower 0's: the same in all copies, even if they depend on the batch
        statistics = [next(averaged) if each.is_mean else each.value for each in first.towers[0].context.statistics]
        regularization.append(replica.receive(list(zip(grads, originals, strict=True)), statistics, changes))
    data_loss, stopping = values[0][0], values[0][1] if votes else None
    with first.here():
        loss = data_loss + regularization[0]
    # Layers may assign values that are read from the weights, so these are needed before the update.
    moving = [each.value.op for replica in replicas for each in replica.moving]
    return Mean(loss, data_loss, first.mean_grads, [*all_reduce.operations, *moving], stopping, ask_to_stop)


def _stop_request(dtype: tf.DType) -> tuple[list[tf.Tensor], tf.Operation]:
    """Returns a scalar in a list, above 0 once this worker asks all to end, and the op that asks."""
    collections = [v1.GraphKeys.LOCAL_VARIABLES]
    asked = v1.get_variable("stopping", [], dtype, v1.zeros_initializer(), trainable=False, collections=collections)
    return [asked.read_value()], asked.assign(1, read_value=False)


def built_towers(replicas: Sequence[Replica]) -> list[BuiltTower]:
    """Returns the towers of all replicas, in the order of their batches."""
    # the towers of a replica are not consecutive
    return sorted((tower for replica in replicas for tower in replica.towers), key=lambda tower: tower.context.tower)


def fingerprints(replicas: Sequence[Replica], all_reduce: AllReduce) -> tf.Tensor:
    """Returns int64 [replicas of all workers, variables], fingerprints (FarmHash) of the bytes of the copied
    variables."""
    with v1.name_scope("mirrors"):
        # hashes of bytes, as comparing the copies themselves would send all weights
        method, as_row = tf.constant("farmhash64"), tf.constant([1, -1])

        def fingerprint(variable):
            values = tf.bitcast(tf.reshape(variable.read_value(), as_row), tf.uint8)
            return tf.raw_ops.Fingerprint(data=values, method=method)

        rows = [tf.concat([fingerprint(v) for v in replica.variables.copied()], axis=0) for replica in replicas]
        return all_reduce.gather(tf.bitcast(tf.stack(rows), tf.int64))


def _check_alike(replicas: Sequence[Replica]) -> None:
    """Raises GraphError if a tower's layers noted other statistics than tower 0's, or drew other random numbers."""
    calls_by_tower = {
        tower.context.tower: (  # canonical, as the names of copies differ
            [replica.variables.canonical_name(each.moving) for each in tower.context.statistics],
            tower.context.draws.names,
        )
        for replica in replicas
        for tower in replica.towers
    }
    for i, calls in calls_by_tower.items():
        if calls != calls_by_tower[0]:
            counts, first_counts = (collections.Counter(moved) + drawn for moved, drawn in (calls, calls_by_tower[0]))
            differing = [name for name in counts | first_counts if counts[name] != first_counts[name]]
            raise errors.GraphError(
                f"tower_{i} and tower_0 do not compute alike: {', '.join(differing) or 'layers in another order'}. Let "
                "each call of inference and loss call the same layers, and not within a tf.function, which keeps the "
                "numbers of the tower that traced it."
            )
