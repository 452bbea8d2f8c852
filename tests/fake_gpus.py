"""GPUs that hold memory but cannot compute, and what becomes of graphs on them: python -m fake_gpus PLUGIN.

PLUGIN is gpus/fake_gpu.cc, built. Prints in JSON what `audit` finds of each case of gpu_graphs. The environment is to
have FAKE_GPUS, TF_CPP_VMODULE=placer=3 and TF_DUMP_GRAPH_PREFIX before TensorFlow is imported.
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

import gpu_graphs
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import function_def_to_graph, load_library

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


# Graphs, as they are placed.


def main(plugin):
    load_library.load_pluggable_device_library(plugin)
    gc.disable()  # a graph has hundreds of thousands of objects, and stays
    dumps = pathlib.Path(os.environ["TF_DUMP_GRAPH_PREFIX"])
    print(json.dumps({name: audit(name, dumps) for name in (*gpu_graphs.TRAINERS, *gpu_graphs.FRONTS)}))
    sys.stdout.flush()
    os._exit(0)  # some destructors of a session would compute on a GPU


def audit(name, dumps):
    """Says what becomes of a case's graph on GPUs.

    Args:
      name: of a case of gpu_graphs.
      dumps: the folder that TensorFlow's placer writes to.

    Returns:
      refused: why there are no executors without soft placement, as for an operation that has no kernel on its device.
      on_gpus: the number of nodes that the placer left on GPUs.
      through_host: the ops of preprocessing on GPUs that may take or give more of an example than a number from the
        host's memory.
      crossing: {'CPU to GPU', 'GPU to CPU', 'GPU to GPU': bytes} of a step of the trainer that is finite.
      towers, session, context: the towers' devices, and the GPU options of the session and outside of sessions.
    """
    step = gpu_graphs.graph_of(name)
    refused, placed = make_executors(step, dumps)
    nodes = {} if refused else read_placed(placed)
    return {
        "refused": refused,
        "on_gpus": sum("GPU" in node.device for node in nodes.values()),
        "through_host": sorted({op.type for op in step.graph.get_operations() if gives_to_host(op)}),
        "crossing": crossings(step.graph, nodes, step.fetches) if nodes and name in gpu_graphs.TRAINERS else None,
        "towers": step.towers,
        "session": str(step.config.gpu_options),
        "context": str(tf.__internal__.eager_context.get_config().gpu_options),
    }


def gives_to_host(op):
    """Whether a batch's numbers may be in the host's memory in preprocessing on a GPU, as most kernels' int32 are."""
    in_int32 = (each for each in (*op.inputs, *op.outputs) if each.dtype == tf.int32)
    placed = "GPU" in op.device and "/preprocess/" in op.name
    return placed and any((each.shape.num_elements() or 0) > MOST for each in in_int32)


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


def crossings(graph, nodes, fetches):
    """{'CPU to GPU', 'GPU to CPU', 'GPU to GPU': bytes} of a step that is finite; nodes: as of read_placed."""
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
