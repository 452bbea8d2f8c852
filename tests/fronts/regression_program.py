"""One task of a cluster that trains the linear regression to step 4, on to step 9, then a table of which each example
has some rows, then the regression until the worker stops it, and once more until the worker hangs.

python tests/fronts/regression_program.py MODEL_DIR
"""

import json
import sys
import time

import jobs
import numpy as np
import tensorflow as tf
from regression import BATCH, X, Y, make, model_fn

from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
TABLE_ROWS = [[[0], [1, 2, 2], [3]], [[2, 3], [0], [1, 1, 1], [2]]]  # over workers, over their batches


class Weights(tf_estimator.SessionRunHook):
    """Keeps all variables, and other draws of gammas, as they are at the end."""

    def begin(self):
        drawn = [op for op in v1.get_default_graph().get_operations() if op.type == "RandomGamma"]
        self._variables = {v.op.name: v.read_value() for v in v1.global_variables()}
        self._variables |= {f"gamma {i}": op.outputs[0] for i, op in enumerate(drawn)}

    def end(self, session):
        self.values = {name: value.tolist() for name, value in session.run(self._variables).items()}


def hang(run_context):
    print("hangs", flush=True)
    time.sleep(1000)


def in_turn(input_context):
    """Batches that the workers take in turn."""
    assert input_context.num_replicas_in_sync == 4
    batches = tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat().batch(BATCH)
    return batches.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


def table_rows(input_context):
    rows = TABLE_ROWS[input_context.input_pipeline_id]
    return tf.data.Dataset.from_generator(lambda: map(np.array, rows), output_types=tf.int64, output_shapes=[None])


def table_fn(features, mode):
    table = v1.get_variable("table", [4, 2], tf.float64, v1.ones_initializer())
    loss = tf.reduce_mean(tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, features)), 1))
    train_op = v1.train.GradientDescentOptimizer(0.125).minimize(loss, v1.train.get_global_step())
    return tf_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def normalized_fn(features, labels, mode, params):
    """The regression, beside layers that the loss does not depend on."""
    layer = tf.keras.layers.BatchNormalization(momentum=0.5, dtype="float64", name="norm")
    layer(tf.nn.dropout(features["x"], 0.5, seed=7), training=True)
    tf.random.gamma([], 1.0)
    return model_fn(features, labels, mode, params)


def main(model_dir):
    line = make(f"{model_dir}/line", 2, save_checkpoints_steps=2, worker_timeout_secs=5)
    is_chief, is_evaluator = line.config.is_chief, line.config.task_type == "evaluator"
    hooks = [Weights() for _ in range(3)]
    stops, hangs = ([], []) if is_chief else ([jobs.stop_at(2)], [jobs.At({1: hang})])
    everything = tf_estimator.EvalSpec(
        lambda: tf.data.Dataset.from_tensors(({"x": X}, Y)), start_delay_secs=0, throttle_secs=1
    )
    if not is_evaluator:
        line.train(in_turn, max_steps=4)
    tf_estimator.train_and_evaluate(line, tf_estimator.TrainSpec(in_turn, 9, hooks[:1]), everything)
    if not is_evaluator:
        line.train(in_turn, max_steps=9)  # as the chief knows, there is nothing to train
        make(f"{model_dir}/table", fn=table_fn, check_towers="never").train(table_rows, hooks=hooks[1:2])
        last = tf_estimator.WarmStartSettings(f"{model_dir}/line", "weights|bias")  # as the chief alone can read it
        stopped = make(f"{model_dir}/stopped", 2, normalized_fn, None, last, check_towers="never")
        stopped.train(in_turn, hooks=[hooks[2], *stops])
        print(json.dumps([hook.values for hook in hooks]), flush=True)
        line.train(in_turn, hooks=hangs)


if __name__ == "__main__":
    main(*sys.argv[1:])
