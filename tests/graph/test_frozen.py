"""layers.frozen: what is not trained stays as it is, costs nothing, and is evaluated as it was trained on."""

import numpy as np
import tensorflow as tf
import toy_workload
import trainings

import tower_train
from tower_train import layers
from tower_train.config import Config
from tower_train.workload import DataRequest

v1 = tf.compat.v1


def network(features, training):
    with layers.frozen():
        normal = layers.batch_normalization(features, training, name="norm")
        hidden = tf.nn.relu(toy_workload.layer("hidden", normal, 8))
    return toy_workload.layer("softmax_linear", hidden, 3)


WORKLOAD = tower_train.Workload("frozen", toy_workload.load, network)
FROZEN = {f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")} | {
    "hidden/weights",
    "hidden/biases",
}
TRAINED = {"softmax_linear/weights", "softmax_linear/biases"}
OPTIONS = dict(num_gpus=2, batch_size=4, optimizer="momentum", learning_rate=0.1, dtype="float64", ema=0.9)


def test_frozen_variables_stay_and_have_no_slots_gradient_nor_decay():
    with trainings.opened(WORKLOAD, toy_workload.load(DataRequest("train")), **OPTIONS) as (built, session):
        variables = {variable.op.name: variable for variable in built.saved.variables}
        start, _, ended = (session.run(fetch) for fetch in (variables, built.report, variables))
    slots = {f"{name}/{slot}" for name in TRAINED for slot in ("Momentum", "ExponentialMovingAverage")}
    assert variables.keys() == FROZEN | TRAINED | slots | {"global_step", "examples_seen"}
    for name in FROZEN | TRAINED:
        assert np.array_equal(ended[name], start[name]) == (name in FROZEN), name
    assert {name.rpartition(" of ")[2] for name in built.checked[1:]} == TRAINED
    needed = v1.graph_util.extract_sub_graph(built.graph.as_graph_def(), [built.train_op.name]).node
    gradients = [node.op for node in needed if "/gradients/" in node.name]
    assert gradients.count("MatMul") == 2, "that of the last weights, in either tower"
    assert "ReluGrad" not in gradients
    [decay] = built.graph.get_collection(v1.GraphKeys.REGULARIZATION_LOSSES)
    assert decay.op.name.startswith("softmax_linear/")


def test_evaluation_restores_frozen_variables_beside_moving_averages(tmp_path):
    config = Config(
        train_dir=str(tmp_path), max_steps=80, check_towers="never", device="cpu", summary_every_steps=0, **OPTIONS
    )
    tower_train.train(WORKLOAD, config)
    [found] = tower_train.evaluate_run(tower_train.EvaluateOptions(train_dir=str(tmp_path)), WORKLOAD)
    assert found.metrics["precision @ 1"].mean > 0.6
