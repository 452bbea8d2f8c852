"""A task of a cluster that trains the linear regression: python -m regression_program MODEL_DIR JSON.

The JSON holds max_steps, towers, settings of RunConfig and, of one task, what goes wrong there.
"""

import json
import sys
import time

import tensorflow as tf
from regression import BATCH, X, Y, make

from tower_train import estimator as tf_estimator


class Wait(tf_estimator.SessionRunHook):
    """Keeps a run from going on after a step."""

    def __init__(self, step):
        self._left = step

    def after_run(self, run_context, run_values):
        self._left -= 1
        if not self._left:
            time.sleep(1000)


def sharded(epochs, input_context):
    """Batches that the workers take in turn."""
    rows = tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat(epochs).batch(BATCH)
    return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


def main(model_dir, text):
    given = json.loads(text)
    estimator = make(model_dir, given.get("towers", 1), **given.get("config", {}))
    hooks = [Wait(given["wait_after"])] if given.get("waits") == estimator.config.task_type else []
    train = tf_estimator.TrainSpec(
        lambda input_context: sharded(given.get("epochs"), input_context), given.get("max_steps"), hooks
    )
    evaluate = tf_estimator.EvalSpec(
        lambda: tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(48), start_delay_secs=0, throttle_secs=0
    )
    result, _ = tf_estimator.train_and_evaluate(estimator, train, evaluate)
    print(json.dumps(result and {name: float(value) for name, value in result.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
