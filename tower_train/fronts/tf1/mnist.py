"""The reader of MNIST in TensorFlow's tutorials: input_data.read_data_sets."""

import collections
import os

import numpy as np
import tf_keras

from tower_train.data import idx

DEFAULT_SOURCE_URL = SOURCE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
Datasets = collections.namedtuple("Datasets", ["train", "validation", "test"])


class DataSet:
    """Images [n, 784] from 0 to 1 and labels, which are taken in batches."""

    def __init__(self, images, labels, seed=None):
        self.images, self.labels, self.num_examples = images, labels, len(images)
        self.epochs_completed, self._at, self._rng = 0, 0, np.random.default_rng(seed)
        self._order = self._rng.permutation(len(images))

    def next_batch(self, batch_size, fake_data=False, shuffle=True):
        """Returns the next images and labels, over the ends of epochs."""
        taken = []
        while len(taken) < batch_size:
            if self._at == self.num_examples:
                self.epochs_completed, self._at = self.epochs_completed + 1, 0
                self._order = self._rng.permutation(self.num_examples)
            part = range(self.num_examples)[self._at : self._at + batch_size - len(taken)]
            taken.extend(self._order[part] if shuffle else part)
            self._at += len(part)
        return self.images[taken], self.labels[taken]


def maybe_download(filename, work_directory, source_url):
    """Returns a file's path; loads it from source_url if it is not there."""
    path = os.path.abspath(os.path.join(work_directory, filename))
    return path if os.path.exists(path) else tf_keras.utils.get_file(path, source_url)


def read_data_sets(
    train_dir, fake_data=False, one_hot=False, dtype=np.float32, reshape=True, validation_size=5000, seed=None,
    source_url=DEFAULT_SOURCE_URL,
):  # fmt: skip
    """Reads the four idx files in a folder, the first validation_size training examples as validation set."""

    def read(name):
        file = f"{name}-ubyte.gz"
        return idx.read(maybe_download(file, train_dir, source_url + file))

    def split(prefix):
        images, labels = read(f"{prefix}-images-idx3"), read(f"{prefix}-labels-idx1")
        images = images.reshape(len(images), -1) if reshape else images[..., np.newaxis]
        images = images.astype(dtype) / 255 if dtype == np.float32 else images
        return images, np.eye(10)[labels] if one_hot else labels

    images, labels = split("train")
    parts = [(images[validation_size:], labels[validation_size:]), (images[:validation_size], labels[:validation_size])]
    return Datasets(*[DataSet(*part, seed) for part in (*parts, split("t10k"))])


def load_mnist(train_dir="MNIST-data"):
    """tf.contrib.learn.datasets' read_data_sets."""
    return read_data_sets(train_dir)


def load_dataset(name):
    """tf.contrib.learn.datasets' load_mnist, by its name."""
    return {"mnist": load_mnist}[name]()
