"""Training steps as graphs for GPUs: of each kind of network that comes with the trainer, and of both fronts."""

import contextlib
import dataclasses
import functools
import importlib
import math
import tempfile
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
import trainings

import tower_train
from tower_train import Examples, estimator
from tower_train.fronts import compat
from tower_train.graph import devices, xla

GPUS = [2, 0]
BATCH = 4  # examples of a tower
_IMAGES, _MIRRORED = (32, 32, 3), "mirrored"
# {name: (module, options of its workload, shape of an example)}; resnet8 has a block of each kind.
NETWORKS = {
    "convnet": ("cifar10", {"model": "convnet"}, _IMAGES),
    "cifar10_94": ("cifar10", {"model": "cifar10_94", "image_sizes": "0:20,1.5:24,4.5:32"}, _IMAGES),
    "resnet8": ("cifar10", {"model": "resnet20"}, _IMAGES),
    "image_folder": ("tower_train.workloads.image_folder", {"image_size": 64}, (64, 64, 3)),
}
# Each kind of network and front, all variable updates, dtypes and all-reduces: {name: arguments of its function below}.
# Not float64, which is for comparisons: its cross-entropy has no kernel on GPUs.
TRAINERS = {
    "convnet": dict(variable_update="cpu", ema=0.9),
    "cifar10_94": dict(variable_update=_MIRRORED, all_reduce="nccl", dtype="float16"),
    "resnet8": dict(variable_update=_MIRRORED, all_reduce="add_n", accumulate_steps=2, clip_gradients=1.0),
    "image_folder": dict(variable_update=_MIRRORED, all_reduce="collective", dtype="bfloat16"),
}
FRONTS = {  # {name: (front, Keras' dtype policy, GPUs of those two, the only ones that the process sees then)}
    "keras": ("keras", "mixed_bfloat16", [1, 0]),
    "keras alone": ("keras", "float32", [0]),
    "estimator": ("estimator", "mixed_bfloat16", [1, 0]),
    "estimator alone": ("estimator", "float32", [1]),
}


class Step(NamedTuple):
    """A graph, what a step fetches and is fed, and the operation that starts its stream, if it has one."""

    graph: object
    fetches: list[str]
    feeds: list[str]
    config: object  # of the session
    towers: tuple[str, ...]
    start: str | None = None
    weights: int = 0  # bytes of variables
    of_shapes: object = None  # a graph that knows the shapes of the tensors, if `graph` does not


def graph_of(name):
    if name in TRAINERS:
        return trainer_step(name, **TRAINERS[name])
    front, policy, gpus = FRONTS[name]
    return {"keras": keras_step, "estimator": estimator_step}[front](policy, gpus)


def trainer_step(network, **options):
    module, fields, shape = NETWORKS[network]
    workload = importlib.import_module(module).WORKLOAD.with_options(fields)
    if network == "resnet8":
        resnet = importlib.import_module("cifar10.resnet")
        workload = dataclasses.replace(workload, inference=functools.partial(resnet.inference, depth=8))
    if network == "cifar10_94":  # two of its three blocks, which are alike
        workload = dataclasses.replace(
            workload, inference_for=functools.partial(workload.inference_for, widths=(64, 256))
        )
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, [64, *shape], np.uint8), rng.integers(0, 10, 64)
    examples = Examples.from_arrays("drawn", images, labels, [f"class {i}" for i in range(10)])
    limits = {name: None for name in ("global_batch_size", "epochs") if name in workload.recipe}
    common = {"gpus": tuple(GPUS), "summary_every_steps": 0, "dtype": "float32", "ema": 0.0, "batch_size": BATCH}
    common["jit_compile"] = "always"  # as a run on GPUs has it by default
    if options.get("variable_update") == "mirrored":
        common["stall_timeout_secs"] = 1800.0  # as a run has it by default
    config = workload.config(**(common | limits | options))
    placed = devices.place(config)
    built = trainings.build(workload, examples, config, placed)
    fetches = [tensor.name for tensor in tf.nest.flatten(built.report)]
    return Step(built.graph, fetches, [], placed.session_config, placed.towers, built.stream.initializer.name)


# The other fronts, with one network of the usual layers.


def keras_model(policy):
    layers = keras.layers
    keras.config.set_dtype_policy(policy)
    # Nothing is computed on these GPUs.
    with tf.device("/cpu:0") if tf.executing_eagerly() else contextlib.nullcontext():
        return keras.Sequential(
            [
                keras.Input([8, 8, 3]),
                layers.Conv2D(4, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(400),
                layers.Dense(100),
                layers.Dense(10, dtype=keras.config.dtype_policy().variable_dtype),
            ]
        )


def num_bytes(variables):
    return sum(math.prod(each.shape) * 4 for each in variables)


def compiled(model):
    with tf.device("/cpu:0"):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=True)  # as Keras has it on GPUs by default
    return model


def keras_step(policy, gpus):
    model = keras_model(policy)
    parallel = tower_train.multi_gpu_model(model, gpus=gpus, check_towers="never")
    floatx = keras.config.dtype_policy().variable_dtype
    with tf.device("/cpu:0"):
        batch = tf.zeros([8, 8, 8, 3], floatx), tf.zeros([8], tf.int32)
        compiled(parallel)._symbolic_build(data_batch=batch)
    for weight in model.weights:  # where Keras builds it
        compat.move(weight, "/gpu:0")
    specs = [tf.TensorSpec.from_tensor(each) for each in batch]
    function = tf.function(parallel.train_step, autograph=False).get_concrete_function(tuple(specs))
    definition, captures = function.graph.as_graph_def(), function.graph.captures
    places = {inner.op.name: outer for outer, inner in captures}
    for node in definition.node:
        if node.op == "Placeholder":
            node.device = places[node.name].device if node.name in places else "/device:CPU:0"
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(tf.__internal__.eager_context.get_config())
    xla.leave_to_xla(config)
    ends = [tensor.name for tensor in function.graph.outputs]
    feeds, weights = [tensor.name for tensor in function.graph.inputs], num_bytes(model.weights)
    return Step(graph, ends, feeds, config, parallel.towers, weights=weights, of_shapes=function.graph)


def estimator_step(policy, gpus):
    def model_fn(features, labels, mode):
        logits = keras_model(policy)(features, training=True)
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
        train_op = tf.compat.v1.train.AdamOptimizer().minimize(loss, tf.compat.v1.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    keras.config.set_dtype_policy(policy)
    floatx = keras.config.dtype_policy().variable_dtype

    def input_fn():
        return tf.data.Dataset.from_tensors((tf.zeros([BATCH, 8, 8, 3], floatx), tf.zeros([BATCH], tf.int32))).repeat()

    with tempfile.TemporaryDirectory() as model_dir:
        config = estimator.RunConfig(gpus=gpus, check_towers="never")
        made, specs = estimator.Estimator(model_fn, model_dir, config), []
        with compat.replaced(made, "_train_with_estimator_spec", lambda spec, *_: specs.append(spec)):  # no session
            made.train(input_fn, steps=1)
    [spec] = specs
    graph = spec.loss.graph
    weights = num_bytes(graph.get_collection("trainable_variables"))
    towers = [f"/gpu:{i}" for i in gpus]
    return Step(graph, [spec.train_op.name], [], made._session_config, towers, weights=weights)
