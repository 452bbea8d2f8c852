"""Fashion-MNIST: files found, downloaded and checked; the network of the tutorial."""

import functools
import gzip
import hashlib
import http.server
import shutil
import threading

import idx_files
import numpy as np
import pytest
import tensorflow as tf

from tower_train.data import remote
from tower_train.workload import DataRequest
from tower_train.workloads import fashion_mnist

v1 = tf.compat.v1
NAMES = [file.name for file in fashion_mnist.FILES]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The four files, gzipped, with 48 and 12 images of noise."""
    folder = tmp_path_factory.mktemp("fashion")
    idx_files.write(folder)
    return folder


@pytest.mark.parametrize("below", ["", "fashion-mnist"])
@pytest.mark.parametrize("plain", [False, True])
def test_files_are_found_gzipped_or_plain(data, tmp_path, below, plain):
    folder = shutil.copytree(data, tmp_path / "data" / below)
    if plain:
        for path in folder.iterdir():
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    for split, count in (("train", 48), ("test", 12)):
        examples = fashion_mnist.examples(DataRequest(split, data_dir=str(tmp_path / "data")))
        assert (examples.name, examples.num_examples) == (f"Fashion-MNIST {split}", count)
        assert examples.class_names[9] == "Ankle boot"


def test_missing_files_are_downloaded_whole_and_once(data, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(data))
    contents = {name: (data / name).read_bytes() for name in NAMES}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        files = [remote.RemoteFile(f"http://127.0.0.1:{server.server_port}/{name}", len(content),
                                   ("md5", hashlib.md5(content).hexdigest()))
                 for name, content in contents.items()]  # fmt: skip
        folder = fashion_mnist.download(tmp_path, files)
        server.shutdown()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    assert fashion_mnist.download(tmp_path, files) == folder, "no server is asked again"


def test_the_network_is_that_of_the_tutorial():
    """Keras builds the same: as many weights, and the same outputs from the same weights."""
    layers = tf.keras.layers
    first, *others = (layers.Conv2D(filters, 3, activation="relu") for filters in (32, 64, 64))
    top = layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)
    keras = tf.keras.Sequential([first, layers.MaxPooling2D(2), others[0], layers.MaxPooling2D(2), others[1], *top])
    images = np.random.default_rng(0).uniform(size=[4, 28, 28, 1]).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        logits = fashion_mnist.inference(tf.constant(images), training=True)
        session.run(v1.global_variables_initializer())
        weights, found = session.run([v1.trainable_variables(), logits])
    keras.build([None, 28, 28, 1])
    keras.set_weights(weights)
    np.testing.assert_allclose(found, keras(images).numpy(), atol=1e-5)


def test_the_recipe_can_be_followed_with_another_schedule_too():
    assert fashion_mnist.WORKLOAD.config().optimizer == "adam"
    assert fashion_mnist.WORKLOAD.config(lr_schedule="cosine").epochs == 5
