"""Keras' files of a run: they take raw features, have the classes' names, and are what was trained."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import Examples, Workload, errors
from tower_train.config import ExportOptions
from tower_train.fronts import keras_files
from tower_train.inference import serving
from tower_train.workloads import applications

NAMES = ["cat", "Köter", "鳥"]


def images(request):
    """Grey ones, by which the order of colours cannot be told."""
    rng = np.random.default_rng(len(request.split))
    pixels = rng.integers(0, 256, [12, 8, 8, 1], np.uint8).repeat(3, axis=3)
    return Examples.from_arrays(f"animals {request.split}", pixels, np.arange(12) % 3, NAMES)


def build(activation=None):
    inputs = keras.Input([8, 8, 3])
    flat = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, activation="relu", name="conv")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, activation, kernel_initializer="he_normal")(flat))


def trained(folder, workload):
    once = dict(max_steps=1, learning_rate=1e-5, batch_size=6, train_dir=str(folder), summary_every_steps=0)
    tower_train.train(workload, workload.config(**once, check_data=False, check_towers="never"))
    return folder


def animals(prepare=None, build=build, **functions):
    return Workload("animals", images, tower_train.keras_network(build), prepare=prepare, **functions)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, for animals of all kinds: what they do before and after the network changes no variable."""
    return trained(tmp_path_factory.mktemp("keras"), animals())


def exported(run, folder, workload, **options):
    """Returns lines about the files, and the outputs of the run's network for `colours`."""
    options = ExportOptions(train_dir=str(run), overwrite=True, keras=True, **options)
    lines = keras_files.export(options, folder, workload)
    built, session = serving.open_run(ExportOptions(train_dir=str(run), single_view=True), workload)
    with session:
        return lines, session.run(built.outputs, {built.features["features"]: colours()})


def colours():
    return np.random.default_rng(7).integers(0, 256, [5, 8, 8, 3], np.uint8)


def test_the_model_takes_pixels_as_the_network_of_the_run_does(run, tmp_path):
    """By mean and deviation, and as BGR less means: on colours too, which no example has."""
    lines, expected = exported(run, tmp_path, animals(applications.preprocessing("DenseNet121")), probabilities=True)
    model = keras.models.load_model(tmp_path / "model.keras")
    assert expected["probabilities"].max() < 0.999
    np.testing.assert_allclose(model(colours()), expected["probabilities"], atol=1e-4)
    assert json.loads((tmp_path / "id2label.json").read_text(encoding="utf-8")) == dict(zip("012", NAMES, strict=True))
    assert "model.keras takes raw features, values 0 to 255 of images, and gives probabilities" in lines[1]
    _, expected = exported(run, tmp_path, workload := animals(applications.preprocessing("VGG16")))
    model, weights = keras.models.load_model(tmp_path / "model.keras"), build()
    weights.load_weights(tmp_path / "model.weights.h5")
    for found in (model(colours()), weights(keras_files._prepared(workload, colours()))):
        np.testing.assert_allclose(found, expected["logits"], atol=1e-2)


def test_a_preparation_that_keras_lacks_is_left_out_and_the_file_named_so(run, tmp_path):
    lines, expected = exported(run, tmp_path, animals(lambda features: tf.square(tf.cast(features, tf.float32) / 255)))
    assert (
        not (tmp_path / "model.keras").exists() and "takes features as `prepare` of the workload makes them" in lines[1]
    )
    model = keras.models.load_model(tmp_path / "model.prepared.keras")
    np.testing.assert_allclose(model((colours() / 255) ** 2), expected["logits"], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"probabilities": True}])
def test_a_softmax_of_its_own_and_views_are_minded(run, tmp_path, options):
    loss, views = keras.losses.SparseCategoricalCrossentropy(), lambda x: [(0.5, x), (0.5, tf.reverse(x, [2]))]
    workload = animals(
        applications.preprocessing("DenseNet121"), lambda: build("softmax"), loss=loss, test_time_augmentation=views
    )
    lines, expected = exported(run, tmp_path, workload, **options)
    found = keras.models.load_model(tmp_path / "model.keras")(colours())
    np.testing.assert_allclose(found, expected["probabilities"], atol=1e-4)
    assert "gives probabilities" in lines[1]


def words(request):
    labels = np.arange(30) % 2
    return Examples.from_arrays(f"words {request.split}", np.array(["yes"] * 29 + [""]), labels, ["a", "b"])


def of_words():
    inputs, coded = keras.Input([], dtype="string"), keras.layers.StringLookup(output_mode="one_hot")
    coded.adapt(words(tower_train.DataRequest("train")).first(30)[0].astype(str))
    return keras.Model(inputs, keras.layers.Dense(2)(coded(keras.ops.expand_dims(inputs, 1))))


def test_a_file_that_keras_cannot_load_again_is_no_export(tmp_path):
    """Keras' file loses an empty last word of a vocabulary."""
    workload = Workload("words", words, tower_train.keras_network(of_words))
    with pytest.raises(errors.RunError, match="cannot load it again: the file loses a category '' that comes last"):
        exported(trained(tmp_path / "run", workload), tmp_path, workload)
    assert not list(tmp_path.glob("*.keras")) and not list(tmp_path.glob(".*.keras"))


def test_a_file_that_gives_something_else_when_it_is_loaded_is_no_export(run, tmp_path, monkeypatch):
    load = keras.models.load_model

    def other(*args, **options):
        model = load(*args, **options)
        model.set_weights([weights + 1 for weights in model.get_weights()])
        return model

    monkeypatch.setattr(keras.models, "load_model", other)
    with pytest.raises(errors.RunError, match="differ by .* from the run's"):
        exported(run, tmp_path, animals())
    assert not list(tmp_path.glob("*.keras"))
