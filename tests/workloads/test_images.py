"""The workloads that come with it: Fashion-MNIST's files and its tutorial's network; options of image folders. The one
that new_workload writes trains at once."""

import dataclasses
import gzip
import re
import shutil

import idx_files
import jobs
import numpy as np
import pytest
import tensorflow as tf
import values

from tower_train import errors, new_workload
from tower_train.data import remote
from tower_train.examples import SPLITS, DataRequest
from tower_train.workloads import fashion_mnist, image_folder

v1 = tf.compat.v1
SIZE = 16


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """The four files, gzipped, with 48 and 12 images of noise."""
    folder = tmp_path_factory.mktemp("fashion")
    idx_files.write(folder)
    return folder


@pytest.mark.parametrize(("below", "plain"), [("", False), ("fashion-mnist", True)])
def test_files_are_found_gzipped_or_plain(fashion, tmp_path, below, plain):
    folder = shutil.copytree(fashion, tmp_path / "data" / below)
    if plain:
        for path in folder.iterdir():
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    for split, count in (("train", 48), ("test", 12)):
        examples = fashion_mnist.examples(DataRequest(split, data_dir=str(tmp_path / "data")))
        assert (examples.name, examples.num_examples) == (f"Fashion-MNIST {split}", count)
        assert examples.class_names[9] == "Ankle boot"


def test_missing_files_are_downloaded_whole_and_once(fashion, tmp_path, monkeypatch):
    """By remote.fetch, which tests/cifar10/test_source.py lets fail in every way."""
    contents, asked = {file.name: (fashion / file.name).read_bytes() for file in fashion_mnist.FILES}, []
    fetch = lambda file, folder: asked.append(file) or shutil.copy(fashion / file.name, folder)  # noqa: E731
    monkeypatch.setattr(remote, "fetch", fetch)
    for _ in range(2):
        folder = fashion_mnist.download(tmp_path)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    assert asked == [*fashion_mnist.FILES]


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


def workload(**options):
    return image_folder.WORKLOAD.with_options({"image_size": SIZE, "cache": "memory"} | options)


def test_the_network_follows_the_color_and_the_classes(data):
    made = workload(color="grayscale")
    examples = made.examples(DataRequest("test", data_dir=str(data)))
    with tf.Graph().as_default():
        images, labels = examples.open()(tf.range(3, dtype=tf.int64))
        logits = made.for_examples(examples).inference(made.prepare(images), False)
        assert images.shape == (3, SIZE, SIZE, 1) and logits.shape == (3, 2)


def test_images_are_flipped_unless_told_not_to():
    images = np.random.default_rng(0).integers(0, 256, [1, 4, 5, 1], np.uint8)
    found = values.of(lambda x: workload().augment(x, values.GivenDraws([[0.2]])), images)
    np.testing.assert_allclose(found, images[:, :, ::-1] / 127.5 - 1, atol=1e-6)
    assert workload(flip=False).augment is None


def test_the_folder_must_be_named():
    with pytest.raises(errors.ConfigError, match="--data_dir is missing"):
        workload().examples(DataRequest("train"))


def test_options_reach_the_folder(data, tmp_path):
    request = DataRequest("test", data_dir=str(shutil.copytree(data, tmp_path / "data")))
    (tmp_path / "data" / "test" / "rød" / "bad.png").write_text("x")
    assert workload(skip_bad_images=True).examples(request).num_examples == 6
    with pytest.raises(errors.DataError, match="rød/bad.png is no JPEG, PNG"):
        workload().examples(request)


def test_a_fraction_is_for_validation_beside_a_test_folder(data):
    request = DataRequest("train", data_dir=str(data), validation_fraction=0.3)
    parts = {split: workload().split(dataclasses.replace(request, split=split)) for split in SPLITS}
    assert {split: part.num_examples for split, part in parts.items()} == {"train": 14, "validation": 6, "test": 6}
    assert [part.name for part in parts.values()] == [f"{data} {split}" for split in SPLITS]
    plain = {split: workload().split(DataRequest(split, data_dir=str(data))) for split in SPLITS}
    assert (plain["train"].num_examples, plain["validation"]) == (20, None)
    assert parts["test"] == dataclasses.replace(plain["test"], open=parts["test"].open)


def test_what_it_writes_trains_and_learns_by_the_command_it_prints(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = command(new_workload, "my_spirals")
    assert (status, stderr) == (0, "")
    [words] = re.findall(r"python -m tower_train (.*)\n", stdout)
    words = [*words.split(), "--train_dir=run", "--units=48", "--eval_every_steps=300", "--summary_every_steps=0"]
    done = jobs.command("tower_train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert jobs.read_json(tmp_path / "run", "run.json")["workload"] == "my_spirals"
    found = jobs.read_json(tmp_path / "run", "result.json")["evaluation"]
    assert found["metrics"]["precision @ 1"]["mean"] > 0.9
    assert "MODULE" not in (tmp_path / "my_spirals.py").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *((words.split(), "give one name") for words in ("", "two names", "a-b", "1st", "class", "a/b")),
        (["mine"], "mine.py is there already"),
        (["numpy"], "numpy is a module already"),
        (["__main__"], "__main__ is a module already"),
    ],
)
def test_a_name_that_cannot_be_is_refused(refusal, words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("precious")
    assert text in refusal(new_workload, *words)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
