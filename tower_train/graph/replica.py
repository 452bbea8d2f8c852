"""The replicas: copies of the variables, on the host or on each tower's device, with all that belongs to a copy.

Replica 0 creates the variables, under their canonical names, for checkpoints. The others copy them: local variables
that begin as the originals are, after those have their values. Each replica goes through a step by itself: its towers'
gradients, their mean, the mean over all replicas, weight decay, update. So all copies stay the same to the bit.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tower_train import errors
from tower_train.examples import Tensors
from tower_train.graph import collected, gradients, towers
from tower_train.graph.collectives import AllReduce
from tower_train.graph.context import Context, Statistic
from tower_train.graph.devices import HOST
from tower_train.graph.gradients import Gradient, GradientsAndVariables
from tower_train.graph.layout import Tower

v1 = tf.compat.v1


class Replica:
    """One copy of the variables.

    Attributes:
      device: string of its device.
      contexts: over its towers, what their layers noted.
      tower_grads: over its towers, the gradients, each with the original variable.
      tower_losses: over its towers, scalars.
      mean_grads: the mean gradients over all towers of all workers, each with this replica's variable.
      loss: the mean loss over all towers, scalar.
      weight_decay: the sum of the variables' regularizers, scalar.
      moving: the means of the towers' batch statistics, for this replica's variables.
      variables: {name: (this replica's variable, its regularizer or None)}, in the order of creation.
      states: variables of its optimizer and its moving averages, in the order of creation.
    """

    def __init__(self, device: str = HOST, index: int = 0, first: "Replica | None" = None):
        """Creates no variables yet. index: over this worker's replicas; first: replica 0, None for that itself."""
        self.device, self._scope = device, f"copy_{index}/" if first else ""
        self.contexts: list[Context] = []
        self.tower_grads: list[GradientsAndVariables] = []
        self.tower_losses: list[tf.Tensor] = []
        self.mean_grads: GradientsAndVariables = []
        self.loss: tf.Tensor | None = None
        self.weight_decay: tf.Tensor | float = 0.0
        self.moving: list[Statistic] = []
        self._first = first or self
        self.variables: dict[str, tuple[tf.Variable, Callable | None]] = {}
        self.states: list[tf.Variable] = []
        self._decays = []  # the values of its variables' regularizers, in the order of the variables
        self._contained = []  # those of them that the towers' losses contain

    # The towers.

    @contextlib.contextmanager
    def tower(self, place: Tower, getter: Callable) -> Iterator[None]:
        """Builds a tower within this block: on its device, in its name scope, on this replica's variables.

        Args:
          place: of the tower in the step; tower 0 creates the variables, later ones reuse them.
          getter: custom getter for initial values: `towers.seeded(seed)` or `towers.restored`.

        Raises:
          GraphError: a later tower would create a variable, or some cannot be copied.
        """
        if self is not self._first and not self.variables:
            self._copy_variables()
        collected.begin_tower(self._decays)
        decays = v1.get_collection_ref(v1.GraphKeys.REGULARIZATION_LOSSES)

        def create(create_variable, **kwargs):
            if place.index:
                which = f"the variable {kwargs['name']!r}" if kwargs.get("name") else "a variable without a name"
                raise errors.GraphError(
                    f"tower_{place.index} would create {which}, which tower_0 did not create. "
                    "Create variables with tf.compat.v1.get_variable under names that are the same in every call of "
                    "inference and loss."
                )
            with tf.device(self.device):
                return create_variable(**(kwargs if self.device == HOST else _initialized_on_host(kwargs)))

        def get(get_variable, name, *args, regularizer=None, **kwargs):
            before = len(decays)
            variable = get_variable(name, *args, regularizer=regularizer, **kwargs)
            # TensorFlow's compute the regularizer anew whenever they are used.
            decays[before:] = [each.op.outputs[each.value_index] for each in decays[before:]]
            self._decays += decays[before:]
            if place.index == 0:
                self.variables.setdefault(variable.op.name, (variable, regularizer))
            mine = self._copy_of(variable)
            return mine if variable.trainable else collected.assigned_once(mine)

        with (
            _explained(),
            tf.variable_creator_scope(create),
            v1.variable_scope(v1.get_variable_scope(), reuse=place.index > 0 and v1.AUTO_REUSE, custom_getter=get),
            tf.device(place.device),
            v1.name_scope(f"tower_{place.index}/"),
            v1.variable_scope(v1.get_variable_scope(), custom_getter=getter),
            v1.variable_scope(v1.get_variable_scope(), custom_getter=towers.kept_in_full_precision),
        ):
            yield

    def compute_gradients(self, loss: tf.Tensor) -> GradientsAndVariables:
        """Returns the gradients of a tower's loss for this replica's trained variables, each with the original."""
        originals = v1.trainable_variables()
        return list(zip(v1.gradients(loss, [self._copy_of(v) for v in originals]), originals, strict=True))

    def whole_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the tower that is being built, with the losses that it has collected."""
        loss, contained = collected.whole_loss(loss, self._decays)
        self._contained += [decay for decay in contained if not any(decay is each for each in self._contained)]
        return loss

    def add(self, context: Context, loss: tf.Tensor, tower_grads: GradientsAndVariables) -> None:
        """Adds what a tower computed: what its layers noted in its context, its loss, its gradients."""
        self.contexts.append(context)
        self.tower_losses.append(loss)
        self.tower_grads.append(tower_grads)

    def after_last_tower(self, batch: Tensors) -> Tensors:
        """Delays a batch until the tower that was added last has its gradients."""

        def delayed(tensor):
            with tf.device(tensor.device):
                return tf.identity(tensor)

        with tf.control_dependencies([grad.op for grad, _ in self.tower_grads[-1] if grad is not None]):
            return tf.nest.map_structure(delayed, batch)

    # The means.

    def average_gradients(self) -> GradientsAndVariables:
        """Returns the mean gradients over its towers, each with the original variable."""
        with tf.device(self.device):
            return gradients.average_gradients(self.tower_grads)

    def average_values(self, others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns small values that travel together: the mean loss over its towers, `others`, the mean statistics."""
        with tf.device(self.device), v1.name_scope("average_values"):
            values_of_towers = [
                [loss, *others, *(each.value for each in context.statistics if each.is_mean)]
                for loss, context in zip(self.tower_losses, self.contexts, strict=True)
            ]
            return [tf.add_n(values) / len(values) for values in zip(*values_of_towers, strict=True)]

    def receive(self, mean_grads: list[Gradient], originals: Sequence[tf.Variable], loss, statistics) -> None:
        """Takes the means over all replicas: gradients for these variables, the loss, the statistics' values."""
        self.mean_grads = [(grad, self._copy_of(v)) for grad, v in zip(mean_grads, originals, strict=True)]
        self.loss, self.moving = loss, self._means_of_calls(statistics)

    def _means_of_calls(self, means: Sequence[tf.Tensor]) -> list[Statistic]:
        """Returns one statistic per moving variable, the mean over the calls of its layer, with these means over
        towers as the values."""
        remaining, by_variable = iter(means), {}
        for each in self.contexts[0].statistics:
            each = each._replace(value=next(remaining)) if each.is_mean else each
            by_variable.setdefault(each.moving.ref(), []).append(each)
        return [
            calls[0]._replace(value=tf.add_n([each.value for each in calls]) / len(calls))
            if len(calls) > 1 and calls[0].is_mean
            else calls[0]
            for calls in by_variable.values()
        ]

    # The update.

    def finish_gradients(self, clip_gradients: float) -> None:
        """Adds the weight decay to the mean gradients, once a variable, and clips them, 0 for no limit."""
        decays = [decay for decay in self._decays if not any(decay is each for each in self._contained)]
        with tf.device(self.device):
            self.weight_decay, decayed = gradients.add_weight_decay(self.mean_grads, decays)
            self.mean_grads = gradients.clip(decayed, clip_gradients) if clip_gradients else decayed

    @contextlib.contextmanager
    def state_variables(self) -> Iterator[None]:
        """Makes variables that are created within this block, such as the optimizer's slots, belong to this replica."""

        def create(create_variable, **kwargs):
            if self is not self._first:
                kwargs |= _as_copy(self._first.states[len(self.states)])
            self.states.append(create_variable(**kwargs))
            return self.states[-1]

        with tf.device(self.device), tf.variable_creator_scope(create):
            yield

    def trained(self) -> list[tf.Variable]:
        """Returns its trained variables."""
        return [self._copy_of(variable) for variable in v1.trainable_variables()]

    def name_of(self, variable: tf.Variable) -> str:
        """Returns the canonical name of one of this replica's variables."""
        return variable.op.name.removeprefix(self._scope)

    def copied(self) -> list[tf.Variable]:
        """Returns all that other replicas have a copy of, in the same order in each."""
        return [*(variable for variable, _ in self.variables.values()), *self.states]

    # The variables.

    def _copy_of(self, original: tf.Variable) -> tf.Variable:
        return self.variables.get(original.op.name, (original, None))[0]

    def _copy_variables(self) -> None:
        """Copies all variables that tower 0 asked for."""
        first = self._first.variables
        for variable in v1.trainable_variables():
            if variable.op.name not in first:
                raise errors.GraphError(
                    f"{variable.op.name} cannot be mirrored: the network did not get it from "
                    "tf.compat.v1.get_variable. Get it there, or use --variable_update=cpu."
                )
        for name, (original, regularizer) in first.items():
            with tf.device(self.device):
                copy = v1.Variable(
                    name=f"{self._scope}{name}", dtype=original.dtype.base_dtype, use_resource=True,
                    **_as_copy(original),
                )  # fmt: skip
                self.variables[name] = copy, regularizer
                if regularizer:
                    with v1.name_scope(f"{copy.op.name}/Regularizer/"):
                        decay = regularizer(copy)
                    self._decays += [] if decay is None else [decay]  # None: tf.compat.v1.no_regularizer's


_EXPLAINED = {  # {start and end of a message of TensorFlow, around a variable's name: what to do}
    ("Variable ", " already exists"): "exists already: a second layer would share its weights. Give each layer a "
    "variable_scope or a name of its own; or say reuse=True there to share them.",
    ("Unsuccessful at finding variable ", "."): "is a copy that tf.recompute_grad does not find. Recompute with "
    "--variable_update=cpu.",
}


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises GraphError in one line for some of TensorFlow's errors in this block."""
    try:
        yield
    except ValueError as error:
        for (start, end), text in _EXPLAINED.items():
            if (message := str(error)).startswith(start) and end in message:
                raise errors.GraphError(f"{message.removeprefix(start).partition(end)[0]} {text}") from None
        raise


def make_replicas(devices: Sequence[str]) -> list[Replica]:
    """Makes a replica on each device."""
    first = Replica(devices[0])
    return [first, *(Replica(device, i, first) for i, device in enumerate(devices[1:], 1))]


def average(replicas: Sequence[Replica], all_reduce: AllReduce, others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gives each replica the mean gradients, loss and statistics over all towers of all workers.

    Args:
      replicas: of this worker.
      all_reduce: averages between the replicas of all workers.
      others: scalars of this worker that travel beside the losses.

    Returns:
      The means of `others` over workers.

    Raises:
      GraphError: there are no gradients, or towers have different variables, gradients or statistics.
    """
    grads_of_all = gradients.with_gradients(by_tower(replicas)[0])
    if not grads_of_all[0]:
        raise errors.GraphError(
            "The network trains nothing: its loss depends on no variable. Get some with tf.compat.v1.get_variable."
        )
    remaining = iter(grads_of_all)
    for replica in replicas:
        replica.tower_grads = list(itertools.islice(remaining, len(replica.tower_grads)))
    _check_same_statistics(replicas)
    local = [replica.average_gradients() for replica in replicas]
    means = all_reduce.mean([[grad for grad, _ in grads] for grads in local])
    values = all_reduce.mean([replica.average_values(others) for replica in replicas])
    originals = [variable for _, variable in local[0]]
    for replica, grads, (loss, *noted) in zip(replicas, means, values, strict=True):
        replica.receive(grads, originals, loss, noted[len(others) :])
    return values[0][1 : 1 + len(others)]


def by_tower(replicas: Sequence[Replica]) -> tuple[list[GradientsAndVariables], list[tf.Tensor]]:
    """Returns the gradients and the losses, over the towers of all replicas."""
    tower_grads = [grads for replica in replicas for grads in replica.tower_grads]
    return tower_grads, [loss for replica in replicas for loss in replica.tower_losses]


def fingerprints(replicas: Sequence[Replica], all_reduce: AllReduce) -> tf.Tensor:
    """Returns int64 [replicas of all workers, variables], fingerprints (FarmHash) of the bytes of `copied`."""
    with v1.name_scope("mirrors"):
        method, as_row = tf.constant("farmhash64"), tf.constant([1, -1])

        def fingerprint(variable):
            values = tf.bitcast(tf.reshape(variable.read_value(), as_row), tf.uint8)
            return tf.raw_ops.Fingerprint(data=values, method=method)

        rows = [tf.concat([fingerprint(v) for v in replica.copied()], axis=0) for replica in replicas]
        return all_reduce.gather(tf.bitcast(tf.stack(rows), tf.int64))


def _check_same_statistics(replicas: Sequence[Replica]) -> None:
    """Raises GraphError if some towers' layers noted a statistic that others did not."""
    names_by_tower = [
        [replica.name_of(statistic.moving) for statistic in context.statistics]
        for replica in replicas
        for context in replica.contexts
    ]
    for names in itertools.zip_longest(*names_by_tower):  # over towers, the names of the same call
        if len(set(names)) > 1:
            name = next(filter(None, names))
            raise errors.GraphError(
                f"{name} has {sum(each.count(name) for each in names_by_tower)} batch statistics from {len(names)} "
                "towers. Every tower must call its layer as often as the others."
            )


def _initialized_on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a variable initialised on the host: GPUs draw other numbers from a seed and call no
    Python."""
    initial_value = kwargs.get("initial_value")
    if not callable(initial_value):
        return kwargs
    with tf.init_scope(), tf.device(HOST), v1.name_scope(f"{kwargs.get('name') or 'Variable'}/Initializer/"):
        return kwargs | {"initial_value": initial_value()}


def _as_copy(original: tf.Variable) -> dict[str, Any]:
    """Returns the arguments that make a variable a copy."""
    # Read on the original's device and given as a value: a function's result would be on the copy's.
    with tf.init_scope(), v1.get_default_graph().colocate_with(None, True), tf.device(original.device):
        value = original.read_value()
    return {
        "initial_value": value,
        "trainable": False,
        "constraint": original.constraint,
        "collections": [v1.GraphKeys.LOCAL_VARIABLES],
    }
