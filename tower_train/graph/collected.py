"""Traces of networks in TensorFlow 1's manner: variables that they assign, losses in collections.

A tower's assignments become statistics of its batch, and its collected losses part of its loss, so that N towers
together do once what one tower does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from tower_train import errors
from tower_train.graph import context
from tower_train.graph.random_state import ancestors, source_line

v1 = tf.compat.v1
_COLLECTIONS = (v1.GraphKeys.REGULARIZATION_LOSSES, v1.GraphKeys.LOSSES, v1.GraphKeys.UPDATE_OPS)


def assigned_once(variable: tf.Variable) -> tf.Variable:
    """Turns a tower's assignments to a variable that is not trained into a statistic: the variable gets the mean over
    towers once a step (of integers, tower 0's value). Until then its tower alone reads what it assigned."""
    if not isinstance(variable.assign, functools.partial):  # else it is one already
        assigns = {"assign": lambda _, value: value, "assign_add": tf.add, "assign_sub": tf.subtract}
        for name, combine in assigns.items():
            # on the object, as the class is shared with variables that no tower has
            setattr(variable, name, functools.partial(_assign, variable, combine, getattr(variable, name)))
        for name in ("value", "read_value"):
            setattr(variable, name, functools.partial(_read, variable, getattr(variable, name)))
    return variable


def _assign(
    variable: tf.Variable, combine: Callable, plain: Callable, value, use_locking=None, name=None, read_value=True
):
    statistics = context.current().statistics
    if statistics is None or v1.get_default_graph() is not variable.graph:  # no tower, or a branch or loop of one
        return plain(value, use_locking=use_locking, name=name, read_value=read_value)
    value = combine(variable.value(), tf.convert_to_tensor(value, variable.dtype))
    value = tf.stop_gradient(tf.ensure_shape(value, variable.shape), name=name)
    # of several assignments the last one holds, as on one device
    statistics[:] = [statistic for statistic in statistics if statistic.moving is not variable]
    statistics.append(context.Statistic(variable, value, momentum=0.0, is_averaged=False))
    return value if read_value else value.op


def _read(variable: tf.Variable, plain: Callable, *args, **kwargs) -> tf.Tensor:
    # a program reads what it has just assigned, as on one device
    statistics = context.current().statistics or ()
    if v1.get_default_graph() is variable.graph:
        for statistic in statistics:
            if statistic.moving is variable and not statistic.momentum:
                return statistic.value
    return plain(*args, **kwargs)


@contextlib.contextmanager
def collections_of_tower(
    decays: Sequence[tf.Tensor], collections: Mapping[str, Sequence[str]]
) -> Iterator[Callable[[str, tf.Variable], None]]:
    """Lets collections hold the losses, and the variables or their copies, of this tower only.

    Args:
      decays: the values of the variables' regularizers, which all towers share.
      collections: {variable's name: the collections in which it was created}.

    Yields:
      A function that notes a variable for which the tower has asked, by the original's name.
    """
    # else a tower would collect the losses of the one before once more
    for name in _COLLECTIONS:
        v1.get_collection_ref(name)[:] = decays if name == _COLLECTIONS[0] else []
    # tf.compat.v1.layers, and slim's, collect a regularizer's value only for a variable that was not there before
    all_names = v1.get_default_graph().get_all_collection_keys()
    before = {name: v1.get_collection(name) for name in {v1.GraphKeys.GLOBAL_VARIABLES, *all_names}}
    for name, held in list(before.items()):
        in_network = (isinstance(each, tf.Variable) and each.op.name in collections for each in held)
        if name == v1.GraphKeys.GLOBAL_VARIABLES or any(in_network):
            v1.get_collection_ref(name)[:] = []
        else:
            del before[name]
    added: set[int] = set()

    def note(original: str, variable: tf.Variable) -> None:
        for name in collections.get(original, (v1.GraphKeys.GLOBAL_VARIABLES,)):
            held = v1.get_collection_ref(name)
            if not any(variable is each for each in held):
                added.add(id(variable))
                held.append(variable)

    try:
        yield note
    finally:
        for name in before:
            held = v1.get_collection_ref(name)
            held[:] = before[name] + [each for each in held if id(each) not in added]


def whole_loss(loss: tf.Tensor, decays: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns a tower's loss with its collected regularization losses, and the values of the variables' regularizers
    that it already contains. Runs UPDATE_OPS. GraphError if another loss was collected that is not part of the loss."""
    regularization, others, updates = map(v1.get_collection, _COLLECTIONS)
    collected = [each for each in (*regularization, *others) if each is not loss]
    if not collected and not updates:
        return loss, []
    # a program may have added them itself, and would then decay twice
    before = ancestors([loss.op]) if collected else set()
    for each in others:
        if each.op not in before and each is not loss:
            raise errors.GraphError(
                f"{each.op.name.partition('/')[2]} ({source_line(each.op)}) is in tf.compat.v1.GraphKeys.LOSSES, but "
                "not part of the loss. Let the workload's `loss` add it, or compute it with loss_collection=None."
            )
    contained = [each for each in decays if each.op in before]
    added = [each for each in regularization if each.op not in before and not any(each is decay for decay in decays)]
    # a loop of TensorFlow 1 would run them beside its train_op
    with tf.control_dependencies(updates):
        return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in added)]), contained
