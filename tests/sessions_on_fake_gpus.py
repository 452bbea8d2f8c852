"""The GPUs that all sessions of a process ask for: python -m sessions_on_fake_gpus PLUGIN FOLDER DATA_DIR.

Trains with evaluations on GPUs 2 and 0, evaluates, exports, uses an Estimator and sides of the benchmark, all in one
process. PLUGIN gives four fake GPUs; as these cannot compute, sessions are then opened without.
Prints JSON: the eager context's GPU options, those of every session that asked for GPUs by what opened it, and the peak
of the memory on each GPU.
"""

import contextlib
import json
import os
import pathlib
import sys

import numpy as np

FAKE_GPUS = 4


def main(plugin, folder, data_dir):
    os.environ["FAKE_GPUS"] = str(FAKE_GPUS)
    import tensorflow as tf
    from tensorflow.python.framework import load_library

    load_library.load_pluggable_device_library(plugin)
    found = {}
    for name, use in {"train": train, "evaluate": evaluate, "estimator": use_estimator, "matrix products": multiply,
                      "port": train_port, "export": export}.items():  # fmt: skip
        with contextlib.redirect_stdout(sys.stderr), recorded(tf) as asked:
            use(tf, folder, data_dir)
        found[name] = [options(config) for config in asked if config is None or config.device_count.get("GPU") != 0]
    config = tf.__internal__.eager_context.get_config()
    from tower_train.bench import worker

    print(json.dumps({"context": options(config), "sessions": found, "card_bytes": worker.card_bytes()}))
    sys.stdout.flush()
    os._exit(0)  # some destructors would compute on a GPU


def options(config):
    return config and f"{config.gpu_options}{config.pluggable_device_options}"


@contextlib.contextmanager
def recorded(tf):
    """Lists the configurations of the sessions that are opened within this block."""
    from tensorflow.python.client import session

    open_session, asked = session.BaseSession.__init__, []

    def open_and_record(self, target="", graph=None, config=None):
        asked.append(config)
        without = tf.compat.v1.ConfigProto(allow_soft_placement=True, device_count={"CPU": 2, "GPU": 0})
        open_session(self, target, graph, without)

    session.BaseSession.__init__ = open_and_record
    try:
        yield asked
    finally:
        session.BaseSession.__init__ = open_session


def train(tf, folder, data_dir):
    import tower_train

    config = tower_train.Config(
        gpus=(2, 0), variable_update="mirrored", all_reduce="add_n", batch_size=8, max_steps=4, eval_every_steps=2,
        train_dir=f"{folder}/run",
    )  # fmt: skip
    tower_train.train("toy_workload", config)


def evaluate(tf, folder, data_dir):
    import tower_train

    list(tower_train.evaluate_run(tower_train.EvaluateOptions(train_dir=f"{folder}/run")))


def export(tf, folder, data_dir):
    from tower_train.config import ExportOptions
    from tower_train.inference import saved_model

    saved_model.export(ExportOptions(train_dir=f"{folder}/run"), pathlib.Path(folder, "export"))


def use_estimator(tf, folder, data_dir):
    from tower_train import estimator

    def model_fn(features, labels, mode):
        outputs = tf.matmul(features["x"], tf.compat.v1.get_variable("weights", [3, 1]))
        if mode == "infer":
            return estimator.EstimatorSpec(mode, predictions={"y": outputs})
        loss = tf.reduce_mean((outputs - labels) ** 2)
        step = tf.compat.v1.train.get_or_create_global_step()
        update = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return estimator.EstimatorSpec(mode, loss=loss, train_op=update)

    def input_fn():
        x = np.ones([8, 3], np.float32)
        return tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, :1])).batch(2)

    asked = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)
    asked.gpu_options.per_process_gpu_memory_fraction = 0.5
    made = estimator.Estimator(model_fn, f"{folder}/model", estimator.RunConfig(session_config=asked))
    made.train(input_fn)
    made.evaluate(input_fn)
    list(made.predict(input_fn))


def multiply(tf, folder, data_dir):
    from tower_train.bench import trainer

    trainer._MATRIX_SIZES = (8,)
    trainer.multiply(None, 1, lambda: True, "float32", "auto", 1e6)


def train_port(tf, folder, data_dir):
    from cifar10.rivals import port
    from tower_train.workload import DataRequest

    port.train(DataRequest("train", "cifar10", data_dir), 4, lambda loss: True)


if __name__ == "__main__":
    main(*sys.argv[1:])
