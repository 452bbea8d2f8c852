"""GPUs that hold memory but cannot compute, and what becomes of graphs on them: python -m fake_gpus PLUGIN.

PLUGIN is gpus/fake_gpu.cc, built. Prints in JSON what `audit` finds of each case of gpu_graphs. The environment is to
have FAKE_GPUS, TF_CPP_VMODULE=placer=3 and TF_DUMP_GRAPH_PREFIX before TensorFlow is imported.
"""

import collections
import gc
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import gpu_graphs
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import load_library

MOST = 4  # numbers of a batch that may be in the host's memory within preprocessing, one an example
CLUSTER = r'key: "_XlaCluster"\s+value {\s+s: "(.*)"'
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
      transposes: whether the order of axes changes on a GPU.
      clusters: {GPU: numbers of nodes in XLA's clusters there, the largest first}.
      towers, session, context: the towers' devices, and the GPU options of the session and outside of sessions.
      weights, sent: bytes of the variables, and those that a step sends, {"from to": bytes}; of the fronts.
    """
    step = gpu_graphs.graph_of(name)
    refused, placed = make_executors(step, dumps)
    return {
        "refused": refused,
        "on_gpus": placed.count("device:GPU:"),
        "through_host": sorted({op.type for op in step.graph.get_operations() if gives_to_host(op)}),
        "transposes": any(op.type == "Transpose" and "GPU" in op.device for op in step.graph.get_operations()),
        "clusters": clusters(dumps),
        "towers": step.towers,
        "session": str(step.config.gpu_options),
        "context": str(tf.__internal__.eager_context.get_config().gpu_options),
        "weights": step.weights,
        "sent": sent(step, placed) if step.weights and placed else {},
    }


def sent(step, placed):
    """Counts the bytes that a step sends between devices, once for each tensor and receiver."""
    definition, found = tf.compat.v1.GraphDef(), collections.Counter()
    text_format.Parse(placed, definition)
    nodes, graph = {node.name: node for node in definition.node}, step.of_shapes or step.graph
    left, needed, known = [name.partition(":")[0] for name in step.fetches], set(), set()
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += [source.lstrip("^").partition(":")[0] for source in nodes[name].input]
    for node in map(nodes.get, needed):
        for source in node.input:
            name, _, number = source.partition(":")
            begin, end = (each.device[-5:] for each in (nodes.get(name, node), node))
            if begin != end and (source, end) not in known:
                known.add((source, end))
                tensor = graph.get_operation_by_name(name).outputs[int(number or 0)]
                found[f"{begin} {end}"] += tensor.shape.num_elements() * tensor.dtype.size
    return found


def clusters(dumps):
    """Counts the nodes of each cluster that TensorFlow has marked for XLA in the graph it dumped."""
    marked = [path for path in dumps.glob("mark_for_compilation*") if "annotated" not in path.name]
    if not marked:
        return {}
    first = min(marked, key=lambda path: path.stat().st_mtime_ns)  # of the step, then of the stream's start
    found = collections.Counter()
    for node in first.read_text().split("\nnode {"):  # protobuf takes seconds to parse them
        gpu, cluster = re.search(r'^  device: ".*(GPU:\d+)"', node, re.M), re.search(CLUSTER, node)
        if gpu and cluster:
            found[gpu[1], cluster[1]] += 1
    gpus = sorted({gpu for gpu, _ in found})
    return {gpu: sorted((n for (each, _), n in found.items() if each == gpu), reverse=True) for gpu in gpus}


def gives_to_host(op):
    """Returns whether a batch's numbers may be in the host's memory in preprocessing on a GPU, as int32 mostly is."""
    in_int32 = (each for each in (*op.inputs, *op.outputs) if each.dtype == tf.int32)
    placed = "GPU" in op.device and "/preprocess/" in op.name
    return placed and any((each.shape.num_elements() or 0) > MOST for each in in_int32)


def make_executors(step, dumps):
    """Lets TensorFlow place a graph, cut it into parts and make their kernels: of a step, and of the stream's start.

    Returns:
      Why it could not, or None; the text that the placer wrote.
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
        placed = next(dumps.glob("placer_output*")).read_text()
        if step.start:
            session._make_callable_from_options(config_pb2.CallableOptions(target=[step.start]))
        return None, placed
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        return error.message, ""


if __name__ == "__main__":
    main(*sys.argv[1:])
