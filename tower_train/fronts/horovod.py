"""Horovod's names, by the workers of a cluster and the operations between them."""

import tensorflow as tf

from tower_train import errors
from tower_train.cluster import program
from tower_train.fronts import distributed
from tower_train.fronts.distributed import BroadcastGlobalVariablesHook, broadcast_variables
from tower_train.graph import collectives
from tower_train.graph.collectives import Keys, described

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "session_config",
    "shutdown",
    "size",
    "target",
]

v1 = tf.compat.v1

Average, Sum, Adasum = "average", "sum", "Adasum"
_HOROVODS = (  # further arguments of its DistributedOptimizer, without effect, as the means are the same
    "use_locking",
    "device_dense",
    "device_sparse",
    "gradient_predivide_factor",
    "average_aggregated_gradients",
    "num_groups",
    "groups",
    "scale_local_gradients",
)


class Compression:
    """dtypes in which gradients are sent."""

    none, fp16, bf16 = None, tf.float16, tf.bfloat16


def _cluster_attribute(name: str):
    return lambda: getattr(program.current(), name)


init, is_initialized = program.init, program.is_initialized
rank, size, local_rank, local_size = map(_cluster_attribute, ("rank", "size", "local_rank", "local_size"))
target, session_config = map(_cluster_attribute, ("target", "session_config"))  # what this worker's sessions need


def shutdown() -> None:
    """Leaves the cluster when all others do, as the program's end does anyway."""
    program.current().shutdown()


def DistributedOptimizer(  # noqa: N802
    optimizer: v1.train.Optimizer,
    name: str | None = None,
    *,
    compression: tf.DType | None = Compression.none,
    sparse_as_dense: bool = False,
    **horovods,
) -> distributed.DistributedOptimizer:
    """Makes a tower_train.DistributedOptimizer from the arguments of Horovod 0.28; GraphError for another `op` than
    Average, several backward passes, a process set or other arguments."""
    usual = {"op": Average, "backward_passes_per_step": 1, "process_set": None}
    for argument, value in horovods.items():
        if argument not in _HOROVODS and (argument not in usual or value != usual[argument]):
            raise errors.GraphError(
                f"DistributedOptimizer({argument}={value!r}) has no meaning here: each pass is a step of all workers, "
                "on the mean of their gradients. Leave it out. For a batch as large, give accumulated gradients to "
                "optimizer.average()."
            )
    return distributed.DistributedOptimizer(optimizer, name, compression, sparse_as_dense)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Makes the operation that copies root_rank's values of all present global variables to all workers."""
    return broadcast_variables(v1.global_variables(), root_rank)


def allreduce(
    tensor: tf.Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: tf.DType | None = Compression.none,
    op: str | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Adds tensors of one shape and dtype over workers, or by default averages them. It has no gradient.

    average=False means op=Sum; compression is a dtype to send it in. Names are the same in all workers; without them
    they must make such operations in one order. Means of whole numbers are rounded towards 0.
    """
    op = op or (Sum if average is False else Average)
    if op not in (Average, Sum):
        raise errors.GraphError(f"allreduce(op={op!r}): values are averaged or added. Take Average or Sum.")
    tensor = tf.convert_to_tensor(tensor)
    sent = tensor if compression is None or not tensor.dtype.is_floating else tf.cast(tensor, compression)
    result = _between_workers(
        "allreduce",
        name,
        sent,
        f"{op} of {described(tensor.dtype, tensor.shape)}",
        lambda value, size, name: collectives.reduce(value, size, name, "Div" if op == Average else "Id"),
    )
    return tf.cast(result, tensor.dtype)


def allgather(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Returns the rows of all workers, in their order. It has no gradient.

    Each may have any number of rows [rows, ...]; the rest of the shape is the same. name: as for allreduce.
    """
    tensor = tf.convert_to_tensor(tensor)
    return _between_workers(
        "allgather",
        name,
        tensor,
        f"rows of {described(tensor.dtype, tensor.shape[1:])}",
        lambda value, size, name: collectives.gather([value], size, name)[0][0],
    )


def broadcast(tensor: tf.Tensor, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Returns worker root_rank's tensor, of a known shape that is the same in all workers, in all of them. It has no
    gradient. name: as for allreduce."""
    distributed.check_rank(root_rank)
    tensor = tf.convert_to_tensor(tensor)
    return _between_workers(
        "broadcast",
        name,
        tensor,
        f"{described(tensor.dtype, tensor.shape)} of worker {root_rank}",
        lambda value, size, name: collectives.broadcast(
            value if rank() == root_rank else None, tensor.dtype, tensor.shape, size, name
        ),
    )


def _between_workers(kind: str, name: str | None, tensor: tf.Tensor, meaning: str, make) -> tf.Tensor:
    """Returns make(tensor, size, name) once the workers agree on `meaning`; the tensor for one worker."""
    cluster = program.current()
    if cluster.size == 1:
        return tf.identity(tensor)
    name = f"{kind} {name or 'number'}"
    name = f"{name} {Keys.of(v1.get_default_graph()).count(name)}"
    with v1.name_scope(kind), cluster.operations({name: meaning}):
        return make(tf.identity(tensor), cluster.size, name)
