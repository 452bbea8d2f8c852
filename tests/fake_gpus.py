"""GPUs that hold memory but cannot compute, and what becomes of graphs on them: python -m fake_gpus PLUGIN CASES.

PLUGIN is gpus/fake_gpu.cc, built. CASES is a list in JSON; gpu_graphs.graph_of says what a case is. Prints a list in
JSON, what `audit` finds of each. The environment is to have FAKE_GPUS, TF_CPP_VMODULE=placer=3 and TF_DUMP_GRAPH_PREFIX
before TensorFlow is imported.
"""

import collections
import functools
import gc
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import function_def_to_graph, kernels, load_library

MOST = 4  # numbers of a batch that may cross within preprocessing, one an example
COMPILER = shutil.which("g++")
WITHOUT = "no g++, which only this test needs: it builds GPUs that cannot compute (Debian, Ubuntu: apt-get install g++)"


def build(folder):
    """Builds the plugin into a folder; returns its path, or None without g++."""
    if not COMPILER:
        return None
    plugin = pathlib.Path(folder, "fake_gpu.so")
    source = pathlib.Path(__file__).with_name("gpus") / "fake_gpu.cc"
    options = ["-std=c++17", "-shared", "-fPIC", "-O1", f"-I{tf.sysconfig.get_include()}"]
    subprocess.run([COMPILER, *options, source, "-o", plugin], check=True)
    return plugin


# Kernels for GPUs, by the registry of TensorFlow's wheel, which holds CUDA's too, also where there is no GPU.


@functools.cache
def registered(op):
    return [kernel for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT")]  # fmt: skip


def kernel_of(node):
    """The first of a node's kernels for GPUs; None if there is none."""
    fitting = (k for k in registered(node.op) if all(allows(constraint, node) for constraint in k.constraint))
    return next(fitting, None)


def allows(constraint, node):
    value = node.attr[constraint.name]
    found = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
    return found <= set(constraint.allowed_values.list.type)


def nodes_on_gpus(definition):
    """The operations of a GraphDef that it puts on GPUs, those within functions included."""
    functions = {function.signature.name for function in definition.library.function}
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [node for node in nodes if "GPU" in node.device and node.op not in functions]


# Graphs, as they are placed.


def main(plugin, cases):
    load_library.load_pluggable_device_library(plugin)
    gc.disable()  # a graph has hundreds of thousands of objects, and stays
    dumps = pathlib.Path(os.environ["TF_DUMP_GRAPH_PREFIX"])
    print(json.dumps([audit(case, dumps) for case in json.loads(cases)]))
    sys.stdout.flush()
    os._exit(0)  # some destructors of a session would compute on a GPU


def audit(case, dumps):
    """Says what becomes of a case's graph on GPUs.

    Args:
      case: see gpu_graphs.graph_of.
      dumps: the folder that TensorFlow's placer writes to.

    Returns:
      on_gpus: the number of nodes that are put on a GPU, those of function bodies among them.
      lacking: the ops of these without a kernel there, by TensorFlow's registry.
      through_host: the ops on GPUs whose kernels take or give more of an example than a number from the host's memory,
        as those of int32 do.
      refused: why there are no executors without soft placement; None if there are.
      crossing: {'CPU to GPU', 'GPU to CPU', 'GPU to GPU': bytes} of a step of the trainer that is finite.
      towers, session, context: the towers' devices, and the GPU options of the session and outside of sessions.
    """
    import gpu_graphs

    step = gpu_graphs.graph_of(case)
    nodes = nodes_on_gpus(step.graph.as_graph_def())
    refused, placed = make_executors(step, dumps)
    return {
        "on_gpus": len(nodes),
        "lacking": sorted({node.op for node in nodes if kernel_of(node) is None}),
        "through_host": sorted({op.type for op in step.graph.get_operations() if gives_to_host(op)}),
        "refused": refused,
        "crossing": None if refused or "front" in case else crossings(step.graph, placed, step.fetches),
        "towers": step.towers,
        "session": str(step.config.gpu_options),
        "context": str(tf.__internal__.eager_context.get_config().gpu_options),
    }


def gives_to_host(op):
    """Whether a kernel on a GPU takes or gives a batch's tensor by the host's memory."""
    kernel = kernel_of(op.node_def) if "GPU" in op.device and "/preprocess/" in op.name else None
    ends = [*zip(op.op_def.input_arg, op.inputs, strict=False), *zip(op.op_def.output_arg, op.outputs, strict=False)]
    return kernel is not None and any(
        end.name in kernel.host_memory_arg and tensor.dtype != tf.resource and (tensor.shape.num_elements() or 0) > MOST
        for end, tensor in ends
    )


def make_executors(step, dumps):
    """Lets TensorFlow place a graph, cut it into parts and make their kernels: of a step, and of the stream's start.

    Returns:
      Why it could not, or None; what the placer wrote, or None.
    """
    for earlier in dumps.iterdir():
        earlier.unlink()
    config = config_pb2.ConfigProto()
    config.CopyFrom(step.config)
    config.allow_soft_placement = False
    session = tf.compat.v1.Session(config=config, graph=step.graph)
    tensors = [name for name in step.fetches if ":" in name]
    others = [name for name in step.fetches if ":" not in name]
    try:
        session._make_callable_from_options(config_pb2.CallableOptions(fetch=tensors, target=others, feed=step.feeds))
        placed = next(dumps.glob("placer_output*"))
        if step.start:
            session._make_callable_from_options(config_pb2.CallableOptions(target=[step.start]))
        return None, placed
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        return error.message, None


class Placed(NamedTuple):
    """A node as the placer wrote it."""

    op: str
    device: str
    inputs: list[str]  # 'node', 'node:1' or '^node'


def read_placed(path):
    """{name: Placed}; the text of the whole graph takes TensorFlow's own reader seconds."""
    nodes = {}
    for block in re.split(r"^node \{$", path.read_text(), flags=re.MULTILINE)[1:]:
        fields = collections.defaultdict(list)
        for key, value in re.findall(r'^  (name|op|device|input): "(.*)"$', block, re.MULTILINE):
            fields[key].append(value)
        nodes[fields["name"][0]] = Placed(fields["op"][0], fields["device"][0], fields["input"])
    return nodes


def crossings(graph, placed, fetches):
    """{'CPU to GPU', 'GPU to CPU', 'GPU to GPU': bytes} of a step that is finite."""
    nodes = read_placed(placed)
    needed, waiting = set(), [name.partition(":")[0] for name in fetches]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [source.lstrip("^").partition(":")[0] for source in nodes[name].inputs]
    found, counted = collections.Counter(), set()
    for name in needed:
        node = nodes[name]
        for source in node.inputs:
            before, _, index = source.partition(":")
            # The branch of `train` that is not taken in such a step hands nothing on.
            if source[0] == "^" or nodes[before].op == "Switch" and not index or name.startswith("train/else/"):
                continue
            places = nodes[before].device, node.device
            if len(set(places)) == 2 and (source, node.device) not in counted:
                counted.add((source, node.device))
                kinds = [place.rpartition("device:")[2].partition(":")[0] for place in places]
                found[" to ".join(kinds)] += num_bytes(graph, nodes, before, int(index or 0))
    return found


def num_bytes(graph, nodes, name, index):
    """The bytes of a tensor, also of one that TensorFlow's control flow hands on."""
    name, index = handed_on(nodes, name, index)
    if nodes[name].op == "ReadVariableOp":
        variable = graph.get_operation_by_name(handed_on(nodes, nodes[name].inputs[0])[0])
        return tf.TensorShape(variable.get_attr("shape")).num_elements() * variable.get_attr("dtype").size
    while branch := re.fullmatch(r"(.*?)/(then|else)/_\d+/(.*)", name):
        graph, name = branch_of(graph, branch[1], f"{branch[2]}_branch"), branch[3]
    tensor = graph.get_tensor_by_name(f"{name}:{index}")
    return tensor.shape.num_elements() * tensor.dtype.size


def handed_on(nodes, name, index=0):
    """The tensor that control flow hands on under another name: (operation, output)."""
    name, _, number = name.partition(":")
    index = int(number or index)
    if nodes[name].op in ("Switch", "Merge", "Identity", "Enter", "Exit"):
        return handed_on(nodes, nodes[name].inputs[0])
    return name, index


@functools.cache
def branch_of(graph, conditional, which):
    function = graph.get_operation_by_name(conditional).get_attr(which).name
    [definition] = [each for each in graph.as_graph_def().library.function if each.signature.name == function]
    return function_def_to_graph.function_def_to_graph(definition)


if __name__ == "__main__":
    main(*sys.argv[1:])
