"""Names that old programs call of Keras 2, Horovod and tf.contrib, by small programs against numpy or one device."""

import ast
import re

import clusters
import jobs
import numpy as np
import pytest

MULTI_GPU_MODEL = """
import keras, numpy as np, tensorflow as tf
config = tf.ConfigProto()
class Counted(keras.layers.Layer):
    def call(self, values):  # makes a variable that no layer knows of
        with tf.control_dependencies([tf.assign_add(tf.Variable(0.0), 1.0)]):
            return values + np.cast[np.float32](np.float_(0))
class Numbers(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs):
        assert logs["loss"].item() > 0  # a number of NumPy
x = np.random.RandomState(0).rand(10, 4); y = x.sum(1)
for towers in (1, 3):
    seeds = tf.keras.initializers.glorot_uniform(seed=1)
    layers = [tf.keras.layers.Dense(3, input_shape=(4,), kernel_initializer=seeds), tf.keras.layers.Dense(1)]
    layers.insert(1, Counted())
    model = tf.keras.Sequential(layers)
    model.set_weights([np.ones_like(each) / 4 for each in model.get_weights()])
    parallel = model if towers == 1 else tf.keras.utils.multi_gpu_model(model, gpus=towers)
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)  # with variables of its own
    parallel.compile(loss="mse", optimizer=optimizer if towers == 1 else tf.keras.optimizers.TFOptimizer(optimizer))
    parallel.fit(x, y, batch_size=5, epochs=2, verbose=0, shuffle=False, callbacks=[Numbers()])
    print([each.tolist() for each in model.get_weights()])
"""
KERAS_3 = """
import keras, numpy as np, tensorflow as tf
import keras.backend.tensorflow_backend as K
from keras import losses
assert np.mean(tf.nn.dropout(tf.ones([1000]), 0.9) > 0) > 0.5  # 0.9 are kept
from keras.utils.training_utils import multi_gpu_model
from tensorflow.examples.tutorials.mnist import input_data  # imported for its reader, in either mode
layer = keras.layers.Dense(np.prod((1,)), use_bias=False, kernel_initializer="zeros", input_shape=(1,))
template = keras.models.Sequential([layer])
model = multi_gpu_model(template, gpus=2)
model.compile(keras.optimizers.SGD(lr=0.1, decay=0.5), "mse", ["accuracy"])
callbacks = [keras.callbacks.ModelCheckpoint("{epoch}.hdf5", period=2, monitor="acc", save_weights_only=True),
             keras.callbacks.ReduceLROnPlateau(monitor="val_acc", epsilon=0.5, patience=9),
             keras.callbacks.TensorBoard("logs", batch_size=2, write_grads=False)]
assert callbacks[1].min_delta in (0.5, -0.5)
x, y = np.ones([4, 1], np.float32), np.ones([4, 1], np.float32)
assert keras.preprocessing.image.ImageDataGenerator().flow(np.ones([4, 2, 2, 1]), batch_size=3).next().shape[0] == 3
class Halving(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs={}):
        assert logs["acc"].item() == logs["accuracy"]
        K.set_value(self.model.optimizer.lr, K.get_value(self.model.optimizer.lr) / 2)

batches = ((x, y) for _ in iter(int, 1))
callbacks.append(Halving())
history = model.fit_generator(batches, 2, 2, 0, callbacks, (x, y), workers=2, max_q_size=9)
weight = model.get_weights()[0].item()
assert model.metrics_names == ["loss", "acc"] and template.predict_classes(x).tolist() == [[int(weight > 0.5)]] * 4
assert len(model.evaluate_generator(batches, 2)) == 2 and model.predict_generator(batches, 2).shape == (8, 1)
model.save("model.h5")
model.save_weights("weights.h5")
model.save_weights("model.weights.h5")
for load in (lambda: model.load_weights("2.hdf5"), lambda: model.load_weights("weights.h5"),
             lambda: model.load_weights("model.weights.h5"),
             lambda: model.set_weights(keras.models.load_model("model.h5").get_weights())):
    model.set_weights([np.zeros([1, 1])])
    load()
    assert model.get_weights()[0].item() == weight
again = keras.models.load_model("model.h5")
again.fit(x, y, verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)])
pair = [keras.Input([1]), keras.Input([1])]
pair = multi_gpu_model(keras.models.Model(pair, [keras.layers.Dense(1)(each) for each in pair]), gpus=2,
                       check_towers="never")
pair.compile("sgd", ["mse", "mse"])
pair.fit_generator(([[x, x], [y, y]] for _ in "abc"), 2, verbose=0, validation_data=[[x, x], [y, y]])
assert again.optimizer.decay == 0.5 and again.get_weights()[0].item() != weight
assert keras.optimizers.SGD(0.1, 0.9, 1e-6, True).nesterov is True
assert keras.optimizers.Adam(0.1, 0.9, 0.99, None, 1e-6).get_config()["decay"] == 1e-6  # by position
assert K.get_value(keras.optimizers.Adadelta().lr) == 1
rows, weights = np.random.RandomState(0).rand(12, 3), []
for towers in (1, 2):
    begin, normed = keras.initializers.Constant([[1.0], [2.0], [-1.0]]), keras.layers.BatchNormalization()
    normed = keras.models.Sequential([normed, keras.layers.Dense(1, kernel_initializer=begin)])
    normed.build((None, 3))
    parallel = multi_gpu_model(normed, gpus=towers, check_towers="never")
    parallel.compile("adadelta", "mse")
    parallel.fit_generator(((part, part[:, :1]) for part in np.split(rows, 3)), steps_per_epoch=3, verbose=0)
    weights.append(np.concatenate([each.ravel() for each in normed.get_weights()]))
assert np.allclose(*weights, 1e-4, 1e-5) and not np.allclose(weights[0][-4:-1], [1, 2, -1], 1e-4), weights
losses = []  # no longer the module
losses.append(sorted(history.history))
print(losses[0], weight)
"""
HOROVOD = """
import os, signal, numpy as np, horovod.tensorflow.keras as hvd, tensorflow as tf
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where these tests are a job in the background
hvd.init()
rng = np.random.RandomState(hvd.rank())
x, y = rng.rand(8, 3), rng.rand(8, 1)
begin = tf.constant_initializer(hvd.rank())
layer = tf.keras.layers.Dense(1, use_bias=False, input_shape=(3,), kernel_initializer=begin)
model = tf.keras.Sequential([layer])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks).history
means = [float(hvd.allreduce(4.0 * hvd.rank())), int(hvd.broadcast(hvd.rank() + 5, 1))]
print([model.get_weights()[0].ravel().tolist(), [float(loss) for loss in history["loss"]], means], flush=True)
if hvd.rank():
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
hvd.allreduce(1.0)
"""
CONTRIB = """
import importlib, numpy as np, tensorflow as tf
assert importlib.import_module("tensorflow.train").AdamOptimizer is tf.train.AdamOptimizer
try:
    importlib.import_module("tensorflow.train.AdamOptimizer")
    assert False, "a class is no module"
except ImportError:
    pass
sums = tf.contrib.nccl.all_sum([tf.constant(1.0), tf.constant(2.0)])
from tensorflow.python.client import device_lib
assert tf.contrib.data.batch_and_drop_remainder(2) and tf.contrib.estimator.add_metrics
from tensorflow.examples.tutorials.mnist.input_data import DataSet
digits = DataSet(np.zeros([5, 1]), np.arange(5))
assert [digits.next_batch(3, False)[1].size, digits.epochs_completed] == [3, 0]
assert set(digits.next_batch(7)[1]) == set(range(5)) and digits.epochs_completed == 1
hparams = tf.contrib.training.HParams(rate=0.1, sizes=[1], name="a", fast=False)
hparams.parse("rate=0.5,sizes=[2,3],name=b,fast=true").set_hparam("rate", 0.25)
assert hparams.get("rate") == 0.25 and hparams.override_from_dict({"rate": 0.5}).rate == 0.5
assert tf.contrib.training.HParams().parse_json(hparams.to_json(indent=2)) == hparams
logits, targets = np.ones([2, 3, 4], np.float32) * np.arange(4, dtype=np.float32), np.ones([2, 3], int)
weights = np.float32([[1, 1, 0]] * 2)
by_example = tf.contrib.seq2seq.sequence_loss(logits, targets, weights, average_across_batch=False)
balance = tf.contrib.training.GreedyLoadBalancingStrategy(2, tf.contrib.training.byte_size_load_fn)
assert [balance(tf.get_variable(name, [size]).op) for name, size in (("b", 3), ("c", 1), ("d", 1))] == [0, 1, 1]
drop = tf.layers.batch_normalization(tf.ones([2, 3]), training=True)
from tensorflow.contrib.rnn.python.ops import core_rnn_cell
assert core_rnn_cell.BasicLSTMCell is tf.nn.rnn_cell.BasicLSTMCell
table = tf.contrib.lookup.index_table_from_tensor(mapping=["a", "b"], default_value=-1)
positions = table.lookup(tf.constant(["b", "c"]))
lazy, order = [], [[0, 2, 2], [0], [0, 2, 2]]
for is_resource in (False, True):
    rows = tf.get_variable(f"rows{is_resource}", [3, 2], use_resource=is_resource)
    adam = tf.contrib.opt.LazyAdamOptimizer(0.1)
    lazy.append((rows, [adam.minimize(tf.reduce_sum(tf.gather(rows, used) ** 2)) for used in order]))
with tf.Session() as session:
    session.run([tf.tables_initializer(), tf.global_variables_initializer()])
    for rows, steps in lazy:
        expected = session.run(rows)
        moments = np.zeros([2, 3, 2])
        for count, (step, used) in enumerate(zip(steps, order), 1):
            session.run(step)
            gradient = 2 * expected[list(set(used))] * np.unique(used, return_counts=True)[1][:, None]
            new = [0.9, 0.999] * moments[:, list(set(used))].T + [0.1, 0.001] * np.stack([gradient, gradient**2]).T
            moments[:, list(set(used))] = new.T
            first, second = new.T / (1 - np.power([[[0.9]], [[0.999]]], count))
            expected[list(set(used))] -= 0.1 * first / (np.sqrt(second) + 1e-8)
        np.testing.assert_allclose(session.run(rows), expected, 1e-4, 1e-5)
    assert session.run(positions).tolist() == [1, -1]
    assert session.run(sums) == [3, 3]
    print([hparams.values(), session.run(by_example).tolist(),
           [each.device_type for each in device_lib.list_local_devices()]])
"""


ESTIMATOR = """
import numpy as np, tensorflow as tf

def model_fn(features, labels, mode):
    with tf.device("/gpu:3"):  # of a machine that has more than this one
        shift = tf.get_variable("shift", [6])
    kept = tf.nn.dropout(tf.layers.batch_normalization(features + shift, training=True), keep_prob=0.5)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, tf.layers.dense(kept + tf.random_uniform(tf.shape(kept)), 3))
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
    examples = np.random.RandomState(0).rand(64, 6).astype("float32"), np.arange(64) % 3
    return tf.data.Dataset.from_tensor_slices(examples).batch(8, drop_remainder=True)

strategy = tf.contrib.distribute.MirroredStrategy(num_gpus=2)
tf.estimator.Estimator(model_fn, config=tf.estimator.RunConfig(train_distribute=strategy)).train(input_fn, steps=1)
"""


def run(source, *options, cwd):
    """Runs a program by the command; returns the values of its printed lines."""
    (cwd / "old.py").write_text(source)
    done = jobs.command("tower_train.tf1", *options, "old.py", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_keras_2_model_trains_in_towers_what_it_trains_alone(tmp_path):
    alone, towers = map(ast.literal_eval, run(MULTI_GPU_MODEL, cwd=tmp_path))
    for weights, expected in zip(towers, alone, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_keras_3_takes_what_keras_2_had_and_trains_it_in_towers_as_on_one_device(tmp_path):
    first, *_, line = run(KERAS_3, cwd=tmp_path)
    assert first.startswith("towers:   2 equal 1 on this network")
    weight = 0.0
    for step in range(4):
        weight -= 0.1 / (1 + step // 2) / (1 + 0.5 * step) * 2 * (weight - 1)  # halved after the first epoch
    names, _, value = line.rpartition(" ")
    assert {"acc", "accuracy", "loss", "val_acc"} <= {*ast.literal_eval(names)}
    assert float(value) == pytest.approx(weight, rel=1e-5)
    assert not (tmp_path / "1.hdf5").exists()


def test_horovods_keras_trains_in_two_workers_what_numpy_trains_until_one_is_interrupted(tmp_path):
    (tmp_path / "old.py").write_text(HOROVOD)
    with clusters.programs(2, "tower_train.tf1", str(tmp_path / "old.py")) as workers:
        statuses = [worker.process.wait(jobs.WAIT_SECS) for worker in workers]
        outputs = [worker.output() for worker in workers]
    assert statuses == [130, 130], outputs
    assert re.search(r"^tower_train: error: worker 1 \(.*\) was interrupted$", outputs[0], re.MULTILINE)
    shown = [ast.literal_eval(re.search(r"^\[\[.*", output, re.MULTILINE)[0]) for output in outputs]
    data = [(rng.rand(8, 3), rng.rand(8, 1)) for rng in map(np.random.RandomState, range(2))]
    weights, velocity, losses = np.zeros([3, 1]), 0.0, []
    for _ in range(3):
        errors = [x @ weights - y for x, y in data]
        losses.append(np.mean(np.square(errors)))
        gradient = np.mean([2 / 8 * x.T @ error for (x, _), error in zip(data, errors, strict=True)], 0)
        velocity = 0.9 * velocity - 0.2 * gradient
        weights = weights + velocity
    for found, history, means in shown:
        np.testing.assert_allclose(found, weights.ravel(), rtol=1e-5)
        np.testing.assert_allclose(history, losses, rtol=1e-5)
        assert means == [2.0, 6]


def test_an_estimator_draws_and_normalizes_as_one_device_where_shapes_are_those_of_tensorflow_1(tmp_path):
    assert any(line.startswith("towers:   2 equal 1 on this network") for line in run(ESTIMATOR, cwd=tmp_path))


def test_parts_of_contrib(tmp_path):
    (line,) = run(CONTRIB, "--num_gpus=2", cwd=tmp_path)
    hparams, losses, kinds = ast.literal_eval(line)
    assert hparams == {"rate": 0.5, "sizes": [2, 3], "name": "b", "fast": True}
    cross_entropy = np.log(np.exp(np.arange(4)).sum()) - 1
    np.testing.assert_allclose(losses, [cross_entropy * 2 / 2] * 2, rtol=1e-5)
    assert kinds == ["CPU", "GPU", "GPU"]
