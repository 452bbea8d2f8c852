"""Training graphs as TensorFlow places them on GPUs that cannot compute: python -m on_fake_gpus PLUGIN CASES.

CASES is a list of options of Config in JSON, to which gpus=[2, 0] is added. Of each the session's executors are made
without soft placement, which takes a kernel for every operation on its own device. Prints a list in JSON: of each case
the towers, the session's and the context's GPU options, and for the tutorial's network the bytes that cross between
devices in a step.
"""

import collections
import json
import os
import pathlib
import sys
import tempfile


def main(plugin, cases):
    with tempfile.TemporaryDirectory() as dumps:
        os.environ |= {"FAKE_GPUS": "4", "TF_DUMP_GRAPH_PREFIX": dumps, "TF_CPP_VMODULE": "placer=3"}
        import tensorflow as tf
        from tensorflow.python.framework import load_library

        load_library.load_pluggable_device_library(plugin)
        print(json.dumps([about(tf, case, pathlib.Path(dumps)) for case in json.loads(cases)]))
        sys.stdout.flush()
        os._exit(0)  # some destructors of a session would compute on a GPU


def about(tf, case, dumps):
    import cifar10
    from tower_train.graph import devices, training
    from tower_train.workload import DataRequest

    case = dict(case)
    model = case.pop("model", "convnet")
    workload = cifar10.WORKLOAD.with_options({"model": model})
    config = workload.config(gpus=(2, 0), batch_size=4, summary_every_steps=0, **case)
    placed = devices.place(config)
    examples = workload.examples(DataRequest("train", "generated"))
    built = training.training_graph(workload, examples, config, placed)
    placed.session_config.allow_soft_placement = False
    for earlier in dumps.iterdir():
        earlier.unlink()
    session = tf.compat.v1.Session(config=placed.session_config, graph=built.graph)
    session.make_callable(built.report)
    session.make_callable(built.stream_initializer)
    fetches = [tensor.op.name for tensor in built.report]
    return {
        "towers": placed.towers,
        "names": placed.names,
        "session": str(placed.session_config.gpu_options),
        "context": str(tf.__internal__.eager_context.get_config().gpu_options),
        "crossing": crossings(tf, min(dumps.glob("placer_output*"), key=os.path.getmtime), fetches)
        if model == "convnet"
        else None,
    }


def crossings(tf, placed_path, fetches):
    """{'CPU to GPU', 'GPU to CPU', 'GPU to GPU': bytes} of a step that is finite."""
    from google.protobuf import text_format

    placed = tf.compat.v1.GraphDef()
    text_format.Parse(placed_path.read_text(), placed)
    nodes = {node.name: node for node in placed.node}
    for node in placed.node:
        node.attr.pop("_class", None)
    with tf.Graph().as_default() as graph:  # which knows the shapes
        tf.import_graph_def(placed, name="")
    needed, waiting = set(), fetches
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [source.lstrip("^").partition(":")[0] for source in nodes[name].input]
    found, counted = collections.Counter(), set()
    for node in map(nodes.get, needed):
        for source in node.input:
            name, _, index = source.partition(":")
            # The branch of `train` that is not taken in such a step hands nothing on.
            if source[0] == "^" or nodes[name].op == "Switch" and not index or node.name.startswith("train/else/"):
                continue
            places = nodes[name].device, node.device
            if len(set(places)) == 2 and (source, node.device) not in counted:
                counted.add((source, node.device))
                tensor = graph.get_tensor_by_name(f"{name}:{index or 0}")
                kinds = [place.rpartition("device:")[2].partition(":")[0] for place in places]
                found[" to ".join(kinds)] += tensor.shape.num_elements() * tensor.dtype.size
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
