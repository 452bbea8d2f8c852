"""The training graph as TensorBoard draws it: a box for each section of the step, each tower and each layer."""

import bisect

import tensorflow as tf

v1 = tf.compat.v1
TOWERS = "towers"  # the section whose towers and variables have boxes of their own
_MOST_BYTES = 1024  # of a constant drawn with its value


class Sections:
    """Names for parts of a graph, in the order in which they are built.

    They are for the drawing only. Name scopes would change the names of some variables, and so of checkpoints.
    """

    def __init__(self, graph: tf.Graph):
        self._graph, self._starts, self._names = graph, [], []

    def begin(self, name: str) -> None:
        """Begins a section for the following operations."""
        self._starts.append(len(self._graph.get_operations()))
        self._names.append(name)

    def drawing(self) -> bytes:
        """Serializes the graph built so far for an event file, with the sections in front of the names.

        It is only for display: functions and the values of large constants are left out.
        """
        drawn = self._graph.as_graph_def(add_shapes=True)
        drawn.ClearField("library")
        new_names = self._new_names()
        for node in drawn.node:
            node.name = new_names[node.name]
            node.attr.pop("_class", None)  # names of other operations
            node.input[:] = [_renamed(name, new_names) for name in node.input]
            if node.op == "Const" and node.attr["value"].tensor.ByteSize() > _MOST_BYTES:
                tensor = node.attr["value"].tensor
                kept = {"dtype": tensor.dtype, "tensor_shape": tensor.tensor_shape}
                tensor.CopyFrom(type(tensor)(**kept))
        return drawn.SerializeToString(deterministic=True)

    def _new_names(self) -> dict[str, str]:
        """Returns {name of an operation: its unique name in the drawing}."""
        variables = self._graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
        variables += self._graph.get_collection(v1.GraphKeys.LOCAL_VARIABLES)
        scopes = {variable.op.name.split("/")[0] for variable in variables}
        new_names, taken = {}, set()
        for place, operation in enumerate(self._graph.get_operations()):
            name, section = operation.name, bisect.bisect_right(self._starts, place) - 1
            prefix = self._names[section] if section >= 0 else TOWERS
            has_box = prefix == TOWERS and (name.startswith("tower_") or name.split("/")[0] in scopes)
            new_name = name if has_box else f"{prefix}/{name}"
            while new_name in taken:
                new_name += "_"
            taken.add(new_name)
            new_names[name] = new_name
        return new_names


def _renamed(source: str, new_names: dict[str, str]) -> str:
    """Renames an input of a node, such as name, name:1 or ^name."""
    mark = "^" if source.startswith("^") else ""
    name, colon, output = source.removeprefix("^").partition(":")
    return f"{mark}{new_names[name]}{colon}{output}"
