"""Short versions of what no package has today: parts of tf.contrib, and the tutorials' reader of MNIST."""

import itertools
import json
import os
import re
import types

import numpy as np
import tensorflow as tf
import tf_keras

from tower_train import errors
from tower_train.data import idx
from tower_train.fronts import compat
from tower_train.fronts.tf1 import views
from tower_train.fronts.tf_estimator import library, workers

v1 = tf.compat.v1
VERSION = "1.15.5"  # programs compare it
SOURCE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_DEFAULT_UID_WHITE_LIST = []  # of tf.contrib.learn.RunConfig


class Strategy:
    """tf.contrib.distribute's: how many towers train an Estimator, by RunConfig(train_distribute=...)."""

    def __init__(self, devices=None, num_gpus=None, num_gpus_per_worker=None, **_):
        devices = [devices] if isinstance(devices, str) else list(devices or ())
        gpus = len(tf.config.list_physical_devices("GPU"))
        self.num_replicas_in_sync = len(devices) or num_gpus or num_gpus_per_worker or gpus or 1
        # RunConfig takes the number of these, and GPUs if there are any: CPUs stand in for devices without names.
        names = devices if devices and gpus else [f"/cpu:{i}" for i in range(self.num_replicas_in_sync)]
        self.extended, self.worker_devices = self, tuple(names)

    def __getattr__(self, name):  # `scope`, and what Keras' compile(distribute=) asks for
        raise views.NoSuchName(f"strategy.{name}: strategies are for Estimators. Take multi_gpu_model(gpus=N).")


def AllReduceCrossTowerOps(*_, **__):  # noqa: N802
    """Tells a strategy how to average; towers have one way."""


MirroredStrategy = OneDeviceStrategy = CollectiveAllReduceStrategy = ParameterServerStrategy = Strategy


def index_table_from_tensor(mapping, *args, **kwargs):
    """tf.contrib.lookup's, which called the strings mapping."""
    return compat.index_table_from_tensor(mapping, *args, **kwargs)


def all_sum(tensors):
    """tf.contrib.nccl's: the sum, once on the device of each tensor."""
    sums = []
    for tensor in tensors:
        with tf.device(tensor.device):
            sums.append(tf.add_n(tensors))
    return sums


def batch_and_drop_remainder(batch_size):
    """tf.contrib.data's, for `Dataset.apply`."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


class GreedyLoadBalancingStrategy:
    """tf.contrib.training's, for `replica_device_setter`: gives a variable to the device that has the least so far."""

    def __init__(self, num_tasks, load_fn):
        self._loads, self._load = np.zeros(num_tasks), load_fn

    def __call__(self, op):
        task = int(self._loads.argmin())
        self._loads[task] += self._load(op)
        return task


def byte_size_load_fn(op):
    return op.outputs[0].dtype.size * op.outputs[0].shape.num_elements()


def sequence_loss(logits, targets, weights, average_across_timesteps=True, average_across_batch=True, name=None):
    """tf.contrib.seq2seq's: the weighted cross-entropy of [batch, time, classes] logits."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits) * weights
    axes = [axis for axis, averaged in enumerate((average_across_batch, average_across_timesteps)) if averaged]
    return tf.reduce_sum(losses, axes) / (tf.reduce_sum(weights, axes) + 1e-12) if axes else losses


class LazyAdamOptimizer(v1.train.AdamOptimizer):
    """tf.contrib.opt's: a sparse gradient changes only the rows that it has, in moments too."""

    def _apply_sparse_shared(self, grad, var, indices, scatter_add):
        terms = (self._lr_t, self._beta1_t, self._beta2_t, self._epsilon_t, *self._get_beta_accumulators())
        rate, beta1, beta2, epsilon, power1, power2 = (tf.cast(each, grad.dtype) for each in terms)
        m, v = (self.get_slot(var, name) for name in "mv")
        new_m = beta1 * tf.gather(m, indices) + (1 - beta1) * grad
        new_v = beta2 * tf.gather(v, indices) + (1 - beta2) * grad**2
        change = rate * tf.sqrt(1 - power2) / (1 - power1) * new_m / (tf.sqrt(new_v) + epsilon)
        updates = [v1.scatter_update(m, indices, new_m), v1.scatter_update(v, indices, new_v)]
        return tf.group(v1.scatter_sub(var, indices, change), *updates)


class HParams(types.SimpleNamespace):
    """tf.contrib.training's: named values that a string can change."""

    add_hparam = set_hparam = types.SimpleNamespace.__setattr__

    def values(self) -> dict:
        return dict(vars(self))

    def get(self, name, default=None):
        return getattr(self, name, default)

    def to_json(self, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(vars(self), indent=indent, separators=separators, sort_keys=sort_keys)

    def parse_json(self, values_json):
        return self.override_from_dict(json.loads(values_json))

    def override_from_dict(self, values_dict):
        vars(self).update(values_dict)
        return self

    def parse(self, text):
        """Reads "name=value,name=[1,2]"."""
        for name, value in re.findall(r"(\w+)=(\[.*?\]|[^,]*)", text):
            setattr(self, name, value if isinstance(getattr(self, name), str) else json.loads(value.lower()))
        return self


def Experiment(estimator, train_input_fn, eval_input_fn, eval_metrics=None, train_steps=None, eval_steps=100):  # noqa: N802
    """tf.contrib.learn's: an Estimator with its data, as a function that trains and evaluates in turns."""
    train = library.api.TrainSpec(train_input_fn, train_steps)
    return lambda: workers.train_and_evaluate(estimator, train, library.api.EvalSpec(eval_input_fn, eval_steps))


def run(experiment_fn, output_dir=None, schedule="train_and_evaluate", run_config=None, hparams=None):
    """tf.contrib.learn.learn_runner's."""
    if schedule not in (None, "train_and_evaluate", "continuous_train_and_eval"):
        raise errors.ConfigError(f"learn_runner.run(schedule={schedule!r}): it is train_and_evaluate here.")
    return (experiment_fn(run_config, hparams) if run_config else experiment_fn(output_dir))()


class DataSet:
    """Images, [n, 784] from 0 to 1, and labels; a batch may begin in one epoch and end in the next."""

    def __init__(self, images, labels, seed=None):
        self.images, self.labels, self.num_examples, self.epochs_completed = images, labels, len(images), 0
        self._random = np.random if seed is None else np.random.RandomState(seed)
        self._positions = self._endless_positions()

    def _endless_positions(self):
        while self.num_examples:
            yield from self._random.permutation(self.num_examples) if self._shuffle else range(self.num_examples)
            self.epochs_completed += 1

    def next_batch(self, batch_size, fake_data=False, shuffle=True):
        self._shuffle = shuffle
        taken = np.fromiter(itertools.islice(self._positions, batch_size), int)
        return self.images[taken], self.labels[taken]


def maybe_download(filename, work_directory, source_url):
    """Returns a file's path; downloads it from source_url if it is not there."""
    os.makedirs(work_directory, exist_ok=True)
    return tf_keras.utils.get_file(os.path.abspath(os.path.join(work_directory, filename)), source_url)


def read_data_sets(
    train_dir,
    fake_data=False,
    one_hot=False,
    dtype=np.float32,
    reshape=True,
    validation_size=5000,
    seed=None,
    source_url=SOURCE_URL,
):
    """Reads MNIST's four files in a folder, and downloads missing ones; the first images are for validation."""
    if fake_data:
        raise errors.ConfigError("read_data_sets(fake_data=True): there is no made-up data here. Leave it out.")

    def read(name):
        return idx.read(maybe_download(f"{name}.gz", train_dir, f"{source_url}{name}.gz"))

    def data_set(prefix, rows):
        images, labels = read(f"{prefix}-images-idx3-ubyte")[rows], read(f"{prefix}-labels-idx1-ubyte")[rows]
        images = images.reshape(len(images), -1) if reshape else images[..., np.newaxis]
        images = np.float32(images) / 255 if tf.as_dtype(dtype) == tf.float32 else images
        return DataSet(images, np.eye(10)[labels] if one_hot else labels, seed)

    return types.SimpleNamespace(
        train=data_set("train", slice(validation_size, None)),
        validation=data_set("train", slice(validation_size)),
        test=data_set("t10k", slice(None)),
    )
