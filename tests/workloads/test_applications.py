"""Networks of keras.applications on image folders: weights, frozen layers, and what comes of them in every command."""

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings
import values
from keras.src.applications import efficientnet, mobilenet
from PIL import Image

import tower_train
from tower_train import errors
from tower_train.config import ExportOptions
from tower_train.fronts.keras_building import build_isolated
from tower_train.inference import saved_model
from tower_train.workload import DataRequest
from tower_train.workloads import applications, image_folder

v1 = tf.compat.v1
MOMENTS = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225], 0]  # means and deviations of ImageNet, and a count
SIZE, FROZEN, WORKLOAD = 32, "conv_pw_12_bn", "tower_train.workloads.image_folder"
AVERAGE = "/ExponentialMovingAverage"
OPTIONS = dict(image_size=SIZE, flip=False, cache="memory", network="MobileNet", freeze_until=FROZEN)


@pytest.fixture(scope="module", autouse=True)
def short_networks():
    """Keras' own, of which most of the blocks in the middle are left out."""
    block = mobilenet._depthwise_conv_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mobilenet,
            "_depthwise_conv_block",
            lambda x, *args, block_id, **how: x if 2 <= block_id <= 11 else block(x, *args, block_id=block_id, **how),
        )
        patch.setattr(efficientnet, "DEFAULT_BLOCKS_ARGS", efficientnet.DEFAULT_BLOCKS_ARGS[:1])
        yield


@pytest.fixture(scope="module")
def base():
    return keras.applications.MobileNet(include_top=False, weights=None, input_shape=[SIZE, SIZE, 3])


@pytest.fixture(scope="module")
def weights(tmp_path_factory, base):
    """A file as `save_weights` writes it, of a MobileNet with its own moving statistics."""
    rng = np.random.default_rng(0)
    for variable in base.variables:
        if variable.name in ("moving_mean", "moving_variance"):  # small, so that something comes through to the end
            low = 0.01 if variable.name == "moving_variance" else -0.1
            variable.assign(rng.uniform(low, 0.1, variable.shape))
    path = tmp_path_factory.mktemp("weights") / "mobilenet.weights.h5"
    base.save_weights(path)
    return path


@pytest.fixture(scope="module")
def run(data, weights, tmp_path_factory):
    """The folder of a run of 3 steps."""
    directory = tmp_path_factory.mktemp("run")
    options = dict(max_steps=3, num_gpus=1, batch_size=8, summary_every_steps=0, device="cpu")
    options |= dict(optimizer="adam", learning_rate=0.01, ema=0.5)
    config = tower_train.Config(train_dir=str(directory), data_dir=str(data), **options)
    tower_train.train(WORKLOAD, config, workload_options=OPTIONS | {"weights": str(weights)})
    return directory


def test_training_begins_with_the_files_weights_and_leaves_frozen_ones_alone(run, base):
    ended = jobs.variables(run)
    names = [layer.name for layer in base.layers]
    frozen = set(names[: names.index(FROZEN) + 1])
    for variable in base.variables:
        layer, _, _ = variable.path.partition("/")
        is_same = ended[variable.path].tobytes() == variable.numpy().tobytes()
        assert is_same == (layer in frozen), variable.path
        assert (f"{variable.path}/Adam" in ended) == (layer not in frozen and variable.trainable)
        assert (variable.path + AVERAGE in ended) == (layer not in frozen)


def test_evaluation_and_export_need_no_weights_file(run, data, weights, base, tmp_path):
    gone = weights.rename(weights.with_suffix(".gone"))
    try:
        [found] = tower_train.evaluate_run(tower_train.EvaluateOptions(train_dir=str(run)))
        saved_model.export_run(ExportOptions(train_dir=str(run), export_dir=str(tmp_path / "model")))
    finally:
        gone.rename(weights)
    images = np.stack([np.asarray(Image.open(p)) for p in sorted((data / "test").rglob("*.png"))])
    exported = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    logits = exported(features=tf.constant(images))["logits"].numpy()

    model = keras.models.clone_model(base)
    ended = jobs.variables(run)  # where there are moving averages, these
    ended |= {name.removesuffix(AVERAGE): value for name, value in ended.items() if name.endswith(AVERAGE)}
    for mine, theirs in zip(model.variables, base.variables, strict=True):
        mine.assign(ended[theirs.path])
    maps = model(keras.applications.mobilenet.preprocess_input(images.astype(np.float32)), training=False)
    expected = maps.numpy().mean(axis=(1, 2)) @ ended["classifier/kernel"] + ended["classifier/bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    classes = [0, 0, 0, 1, 1, 1]  # blåu, rød
    assert found.metrics["precision @ 1"].mean == np.mean(logits.argmax(axis=1) == classes)


def test_the_base_is_frozen_for_some_epochs_and_then_trained_at_a_smaller_rate(data, weights, base):
    """By plain gradients: two steps are an epoch; the first one after it moves by the factor, whatever was before."""
    after, options = {}, dict(freeze_until="", weights=str(weights), freeze_epochs=1.0)
    for factor in (1.0, 0.25):
        workload = made(unfreeze_rate=factor, **options)
        examples = workload.examples(DataRequest("train", data_dir=str(data)))
        told = dict(batch_size=10, optimizer="sgd", learning_rate=0.01, ema=0.0)
        with trainings.opened(workload, examples, **told) as (built, session):
            for step in range(1, 4):
                session.run(built.report)
                after[factor, step] = session.run({v.op.name: v for v in built.saved.variables})
    still = {v.path for v in base.variables if v.name in ("gamma", "beta", "moving_mean", "moving_variance")}
    for variable in base.variables:
        name, value = variable.path, variable.numpy()
        assert after[1.0, 2][name].tobytes() == after[0.25, 2][name].tobytes() == value.tobytes()
        moved, less = after[1.0, 3][name] - value, after[0.25, 3][name] - value
        np.testing.assert_allclose(less, 0.25 * moved, rtol=1e-3, atol=1e-6 * np.abs(value).max())
        assert moved.any() != (name in still), name
    moved = [after[1.0, step]["classifier/kernel"] for step in (1, 2)]
    assert not np.array_equal(*moved)


def test_imagenets_weights_of_an_efficientnet_are_prepared_for_from_a_file_as_by_kerass_download(tmp_path, monkeypatch):
    """Keras' own network, whose download is this file, has a layer more for it."""
    path = tmp_path / "efficientnet.weights.h5"
    shape = dict(include_top=False, input_shape=(SIZE, SIZE, 3))
    images = np.random.default_rng(0).uniform(0, 255, [2, SIZE, SIZE, 3]).astype(np.float32)

    def both(_):
        begun = keras.applications.EfficientNetB0(weights=None, **shape)
        begun.get_layer("normalization").set_weights(list(map(np.array, MOMENTS)))
        begun.save_weights(path)
        keras.backend.clear_session()
        theirs = keras.applications.EfficientNetB0(weights="imagenet", **shape)
        keras.backend.clear_session()
        options = image_folder.FolderOptions(network="EfficientNetB0", image_size=SIZE, weights=str(path))
        ours = applications._base(options, options.weights)
        return [np.asarray(each(images, training=False)) for each in (theirs, ours)]

    monkeypatch.setattr(efficientnet.file_utils, "get_file", lambda *args, **options: str(path))
    theirs, ours = build_isolated(both, valued=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())


def made(**options):
    return image_folder.WORKLOAD.with_options(OPTIONS | options)


def inference(data, **options):
    """Training logits of the network for this data, in a new graph."""
    with tf.Graph().as_default():
        workload = made(**options)
        examples = workload.examples(DataRequest("train", data_dir=str(data)))
        return workload.for_examples(examples).inference(tf.zeros([1, SIZE, SIZE, 3]), True)


def test_without_weights_the_run_says_that_this_is_no_transfer_learning(data, weights):
    request = DataRequest("train", data_dir=str(data))
    notice = made().examples(request).notice
    assert "This is no transfer learning" in notice and f"up to {FROZEN} stay as random as they are" in notice
    assert made(weights=str(weights)).examples(request).notice is None
    assert made(network="small", freeze_until="").examples(request).notice is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(freeze_until="conv_pw_12_rel"), "MobileNet has no layer of that name, but conv_pw_13_relu, "),
        (dict(network="Xception", freeze_until=""), "--network=Xception and --image_size=32: .*at least 71"),
        (dict(color="grayscale"), "--network=MobileNet takes images in three channels"),
        (dict(network="small"), "--freeze_until=conv_pw_12_bn is for a network of keras.applications: add --network"),
        (dict(freeze_epochs=2.0), "--freeze_epochs=2 needs trained weights: add --weights"),
        (dict(unfreeze_rate=0.5), "--unfreeze_rate=0.5 needs --freeze_epochs. Give that too."),
        (dict(network="VGG61"), "--network=VGG61: it must be one of small, .*VGG16"),
        (dict(weights="a.weights.h5"), "--weights=a.weights.h5.* does not hold the weights of MobileNet without its t"),
        (dict(weights="no.weights.h5"), "--weights=no.weights.h5.*there is no such file"),
    ],
)
def test_options_that_cannot_be_are_refused(data, options, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]).save_weights("a.weights.h5")
    with pytest.raises(errors.ConfigError, match=text) as raised:
        inference(data, **options)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_vgg16_has_its_own_preprocessing():
    """Simonyan and Zisserman's: blue, green, red, less the means of ImageNet."""
    images = np.random.default_rng(0).integers(0, 256, [2, SIZE, SIZE, 3], np.uint8)
    found = values.of(applications.preprocessing("VGG16"), images)
    np.testing.assert_allclose(found, images[..., ::-1] - np.array([103.939, 116.779, 123.68]), atol=1e-4)
