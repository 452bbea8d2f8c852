"""Fashion-MNIST with three convolutions: python -m tower_train --workload=tower_train.workloads.fashion_mnist

28 x 28 grayscale images of ten kinds of clothing (Xiao et al. 2017), 60,000 to train on and 10,000 to test on. The
network, Adam and its learning rate are those of the usual Keras tutorial; after five epochs more than 90 % of the test
images are right.
"""

import pathlib

import tensorflow as tf

from tower_train import layers
from tower_train.data import augmentation, idx, remote
from tower_train.files import data_directory
from tower_train.workload import DataRequest, Examples, Workload

v1 = tf.compat.v1

FOLDER = "fashion-mnist"
CLASS_NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_PREFIXES = {"train": "train", "test": "t10k"}  # of a split's files
_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"

# The MD5s are those of https://github.com/zalandoresearch/fashion-mnist, "Get the data".
FILES = tuple(
    remote.RemoteFile(f"{_URL}{name}.gz", md5)
    for name, md5 in (
        ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
)


def examples(request: DataRequest) -> Examples:
    """Reads the images of a split from --data_dir or `fashion-mnist` in it, gzipped or not; downloads missing ones."""
    directory = data_directory(request.data_dir)
    folder = directory if _has_files(directory) else download(directory)
    images, labels = (_find(folder, file) for file in FILES if file.name.startswith(_PREFIXES[request.split]))
    return idx.examples(f"Fashion-MNIST {request.split}", images, labels, CLASS_NAMES)


def download(directory: pathlib.Path) -> pathlib.Path:
    """Makes `directory`/fashion-mnist unless it is there: all files, or none and a DataError."""
    folder = directory / FOLDER

    def fill(partial: pathlib.Path) -> None:
        for file in FILES:
            remote.fetch(file, partial)

    advice = (
        f"Put its four files ({FILES[0].name} and so on) into {folder}, or name the directory that holds them with "
        "--data_dir."
    )
    return remote.publish_folder("Fashion-MNIST", folder, fill, _has_files, advice)


def inference(images: tf.Tensor, training: bool) -> tf.Tensor:
    """Builds three convolutions of 3 x 3, the first two followed by pooling, and two fully connected layers.

    From images [batch, 28, 28, 1] to logits [batch, 10]. Initial weights are Keras': Glorot's uniform ones, and zeros.
    """
    del training  # no layer behaves differently in it
    maps = images
    for i, filters in enumerate((32, 64, 64), start=1):
        with v1.variable_scope(f"conv{i}"):
            weights = layers.weights([3, 3, maps.shape[-1], filters], maps.dtype)
            maps = tf.nn.conv2d(maps, weights, strides=1, padding="VALID")
            maps = tf.nn.relu(tf.nn.bias_add(maps, layers.biases(maps)))
        if i < 3:
            maps = tf.nn.max_pool2d(maps, ksize=2, strides=2, padding="VALID")
    height, width, channels = maps.shape[1:]
    hidden = tf.reshape(maps, [-1, height * width * channels])
    with v1.variable_scope("dense"):
        hidden = tf.nn.relu(layers.affine(hidden, 64))
    with v1.variable_scope("softmax_linear"):
        return layers.affine(hidden, len(CLASS_NAMES))


def prepare(images: tf.Tensor) -> tf.Tensor:
    """Scales 0..255 to 0..1: float32 of the same shape."""
    return tf.cast(images, tf.float32) * (1 / 255)  # a division is rounded otherwise in some graphs


def _has_files(folder: pathlib.Path) -> bool:
    return all(_find(folder, file) for file in FILES)


def _find(folder: pathlib.Path, file: remote.RemoteFile) -> pathlib.Path | None:
    """Returns the path of a file, unpacked or gzipped."""
    return next((path for name in (file.name.removesuffix(".gz"), file.name) if (path := folder / name).exists()), None)


def workload(options: augmentation.PlacedImageOptions) -> Workload:
    """Makes the workload under these options."""
    return Workload(
        name="fashion_mnist",
        examples=examples,
        inference=inference,
        **augmentation.functions(options, prepare),
        prepare=prepare,
        augments_on_devices=True,
        options=options,
        configure=workload,
        recipe={"optimizer": "adam", "learning_rate": 0.001, "learning_rate_decay_factor": 1.0, "epochs": 5.0},
    )


WORKLOAD = workload(augmentation.PlacedImageOptions())
