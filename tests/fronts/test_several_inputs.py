"""A Keras network with named inputs, of dictionaries of arrays: trained, evaluated, exported, and loaded by Keras."""

import pathlib

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import Config, EvaluateOptions, Examples, Workload, errors
from tower_train.config import ExportOptions
from tower_train.fronts import keras_files
from tower_train.inference import saved_model

CITIES = ["Lima", "Oslo", "Rome"]
LOAD = """
import keras, numpy as np, sys
features = {name: keras.ops.convert_to_tensor(values) for name, values in np.load(sys.argv[2]).items()}
model = keras.models.load_model(sys.argv[1] + "/model.keras")
again = keras.models.load_model(sys.argv[1] + "/model.keras")
for variable in again.trainable_variables:
    variable.assign(variable * 0)
again.load_weights(sys.argv[1] + "/model.weights.h5")
np.savez(sys.argv[1] + "/outputs.npz", model(features), again(features))
"""


def arrays(split):
    rng = np.random.default_rng(len(split))
    features = {
        "age": rng.normal(40, 10, [60, 1]),
        "city": rng.choice(CITIES, [60, 1]),
        "more": rng.normal(size=[60, 2]),
    }
    return features, (features["age"][:, 0] + 9 * (features["city"][:, 0] == "Oslo") > 43).astype(int)


def examples(request):
    return Examples.from_arrays(f"people {request.split}", *arrays(request.split), ["young", "old"])


def build():
    age, more = keras.Input([1], name="age"), keras.Input([2], name="more")
    city = keras.Input([1], name="city", dtype="string")
    scaled, coded = keras.layers.Normalization(axis=None), keras.layers.StringLookup(output_mode="one_hot")
    scaled.adapt(arrays("train")[0]["age"])
    coded.adapt(arrays("train")[0]["city"])
    parts = [keras.layers.BatchNormalization()(scaled(age)), coded(city), keras.layers.Dense(3)(more)]
    hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(parts))
    return keras.Model([more, age, city], keras.layers.Dense(2)(hidden))


WORKLOAD = Workload("people", examples, tower_train.keras_network(build))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    options = dict(num_gpus=2, batch_size=15, max_steps=10, optimizer="adam", learning_rate=0.03, ema=0.8)
    options |= dict(summary_every_steps=0, log_every_steps=1, check_towers="never", check_data=False)
    config = Config(train_dir=str(folder / "run"), **options)
    result = tower_train.train(WORKLOAD, config)
    assert result.history["loss"][-1] < result.history["loss"][0]
    np.savez(folder / "features.npz", **arrays("test")[0])
    return folder


def test_what_is_evaluated_and_exported_is_what_keras_loads_in_a_fresh_process(run):
    [evaluation] = tower_train.evaluate_run(EvaluateOptions(train_dir=str(run / "run")), WORKLOAD)
    options = ExportOptions(train_dir=str(run / "run"))
    path, _ = saved_model.export_run(options, WORKLOAD)
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    features, labels = arrays("test")
    logits = signature(**{name: tf.constant(values) for name, values in features.items()})["logits"].numpy()
    assert evaluation.weights == "moving averages"
    assert evaluation.metrics["precision @ 1"].mean == pytest.approx(np.mean(logits.argmax(axis=1) == labels))

    lines = keras_files.export(options, run / "keras", WORKLOAD)
    names = [pathlib.Path(part.strip()).name for part in lines[0].split(",")]
    assert names == ["model.keras", "model.weights.h5", "id2label.json"]
    loaded = jobs.command("-c", LOAD, str(run / "keras"), str(run / "features.npz"))
    assert loaded.returncode == 0, loaded.stderr
    for outputs in np.load(run / "keras" / "outputs.npz").values():
        np.testing.assert_allclose(outputs, logits, rtol=0, atol=1e-5)
    raw = keras_files.export(
        ExportOptions(train_dir=str(run / "run"), raw=True, overwrite=True), run / "keras", WORKLOAD
    )
    outputs = keras.models.load_model(run / "keras" / "model.keras")(
        {name: tf.constant(values) for name, values in features.items()}
    )
    assert raw == lines and not np.allclose(outputs, logits, atol=1e-3)


def test_inputs_are_found_by_the_names_of_the_features():
    network = tower_train.keras_network(build)
    features, _ = arrays("test")
    with pytest.raises(errors.GraphError, match="has an input 'age', and the examples have the features"):
        network({name: tf.constant(values) for name, values in features.items() if name != "age"}, training=False)


def test_files_that_are_there_and_networks_without_a_model_are_named(run):
    options = ExportOptions(train_dir=str(run / "run"))
    own = Workload("people", examples, lambda x, training: build()(x))
    with pytest.raises(
        errors.RunError, match="--keras: the network of workload people is not made by tower_train.keras_network"
    ):
        keras_files.export(options, run / "other", own)
    (run / "model.keras").touch()
    with pytest.raises(errors.RunError, match="model.keras is there already. Name another --export_dir"):
        keras_files.export(options, run, WORKLOAD)
