"""The reader of MNIST in TensorFlow's tutorials: input_data.read_data_sets."""

import os
import types

import numpy as np
import tf_keras

from tower_train import errors
from tower_train.data import idx

SOURCE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"


class DataSet:
    """Images [n, 784] from 0 to 1 and labels, which are taken in batches."""

    def __init__(self, images, labels, seed=None):
        self.images, self.labels, self.num_examples = images, labels, len(images)
        self.epochs_completed, self._rng, self._order = -1, np.random.default_rng(seed), []

    def next_batch(self, batch_size, fake_data=False, shuffle=True):
        """Returns the next images and labels, over the ends of epochs."""
        while len(self._order) < batch_size:
            epoch = self._rng.permutation(self.num_examples) if shuffle else range(self.num_examples)
            self._order, self.epochs_completed = [*self._order, *epoch], self.epochs_completed + 1
        taken, self._order = self._order[:batch_size], self._order[batch_size:]
        return self.images[taken], self.labels[taken]


def maybe_download(filename, work_directory, source_url):
    """Returns a file's path; loads it from source_url if it is not there."""
    path = os.path.abspath(os.path.join(work_directory, filename))
    return path if os.path.exists(path) else tf_keras.utils.get_file(path, source_url)


def read_data_sets(train_dir, fake_data=False, one_hot=False, dtype=np.float32, reshape=True, validation_size=5000,
                   seed=None, source_url=SOURCE_URL):  # fmt: skip
    """Reads the four idx files in a folder, the first validation_size training examples as validation set."""

    def read(prefix):
        files = [f"{prefix}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
        images, labels = (idx.read(maybe_download(file, train_dir, source_url + file)) for file in files)
        images = images.reshape(len(images), -1) if reshape else images[..., np.newaxis]
        return images.astype(dtype) / 255 if dtype == np.float32 else images, np.eye(10)[labels] if one_hot else labels

    (images, labels), test, first = read("train"), read("t10k"), validation_size
    if not 0 <= first < len(images):
        raise errors.ConfigError(
            f"{train_dir}: {len(images)} images; read_data_sets(validation_size={first}) takes all."
        )
    train = DataSet(images[first:], labels[first:], seed)
    return types.SimpleNamespace(
        train=train, validation=DataSet(images[:first], labels[:first], seed), test=DataSet(*test, seed)
    )
