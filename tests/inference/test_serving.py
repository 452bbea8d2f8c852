"""Exported networks and predictions from files are what evaluation saw."""

import dataclasses
import errno
import io
import os
import time

import jobs
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import tower_train
from tower_train import export, predict
from tower_train.config import Config, EvaluateOptions, ExportOptions
from tower_train.data import decoding
from tower_train.graph import devices
from tower_train.inference import saved_model, saved_run, serving
from tower_train.inference.evaluation_graph import evaluation_graph

v1 = tf.compat.v1
CLASSES = ("blåu", "rød")


@pytest.fixture(scope="module")
def run(image_run):
    return image_run


@pytest.fixture(scope="module")
def exported(run):
    folder = run / "export"
    names = ["serving_default", "predict", "files"]
    assert saved_model.export_run(ExportOptions(train_dir=str(run), export_dir=str(folder))) == (folder, names)
    return tf.saved_model.load(str(folder)).signatures


@pytest.fixture(scope="module")
def paths(data):
    """The test images, three of each class, in the order of evaluation."""
    return sorted((data / "test").glob("*/*.png"))


def pixels(paths):
    return np.stack([np.asarray(Image.open(path)) for path in paths])


def mirrored(images):
    """Views whose weights are no powers of two."""
    return [(0.7, images), (0.2, tf.reverse(images, [2])), (0.1, images / 2)]


def with_views(run):
    """The run's workload with those views, whatever its options."""
    workload = saved_run.read(EvaluateOptions(train_dir=str(run))).workload
    return dataclasses.replace(
        workload,
        configure=lambda options: dataclasses.replace(
            workload.configure(options), test_time_augmentation=mirrored, unsure=lambda logits: logits[:, 0] < 1
        ),
    )


@pytest.fixture(scope="module")
def exported_with_views(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views") / "model"
    tower_train.export_run(ExportOptions(train_dir=str(run), export_dir=str(folder)), with_views(run))
    return tf.saved_model.load(str(folder)).signatures


@pytest.mark.parametrize(("batch", "has_views"), [(6, False), (4, True)])
def test_the_exported_network_gives_the_bits_of_evaluation(run, paths, batch, has_views, request):
    exported = request.getfixturevalue("exported_with_views" if has_views else "exported")["serving_default"]
    saved = saved_run.read(EvaluateOptions(train_dir=str(run)), with_views(run) if has_views else None)
    workload = dataclasses.replace(
        saved.workload, metrics=lambda logits, labels: {str(i): logits[:, i] for i in range(logits.shape[-1])}
    )
    placed = devices.place(Config(device="cpu"))
    built = evaluation_graph(workload, saved.examples, batch, saved.dtype, saved.moving_average_decay, placed)
    with built.graph.as_default(), v1.Session(config=placed.session_config) as session:
        v1.train.Saver(built.restored).restore(session, tf.train.latest_checkpoint(str(run)))
        session.run(built.stream_initializer)
        steps = [session.run(built.fetches["metrics"]) for _ in range(6 // batch)]
    for step, images in zip(steps, np.split(pixels(paths)[: 6 // batch * batch], len(steps)), strict=True):
        found = exported(features=tf.constant(images))["logits"].numpy()
        assert np.stack([step[str(k)] for k in range(2)], axis=1).tobytes() == found.tobytes()


def test_evaluations_and_predictions_are_compiled_if_asked_for(run, toy_run, paths, command):
    def evaluated(jit_compile):
        options = EvaluateOptions(train_dir=str(toy_run), batch_size=3, jit_compile=jit_compile)
        [evaluation] = tower_train.evaluate_run(options)
        return evaluation

    plain, compiled = evaluated("never"), evaluated("always")
    assert compiled.confusion == plain.confusion
    assert compiled.metrics["loss"].mean == pytest.approx(plain.metrics["loss"].mean, rel=1e-5)
    printed = [
        command(predict, f"--train_dir={run}", f"--jit_compile={which}", *map(str, paths))
        for which in ("auto", "always")
    ]
    assert printed[0] == printed[1] and printed[0][0] == 0


def test_each_tower_of_an_evaluation_is_compiled(toy_run):
    saved = saved_run.read(EvaluateOptions(train_dir=str(toy_run)))
    placed = devices.place(Config(device="cpu", num_gpus=2))
    built = evaluation_graph(saved.workload, saved.examples, 3, saved.dtype, 0, placed, is_compiled=True)
    metadata = v1.RunMetadata()
    with v1.Session(graph=built.graph, config=placed.session_config) as session, built.graph.as_default():
        session.run([v1.global_variables_initializer(), built.stream_initializer])
        session.run(built.fetches["loss"], options=v1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    launches = [node.device for graph in metadata.partition_graphs for node in graph.node if node.op == "_XlaRun"]
    assert {device.rpartition(":")[2] for device in launches} == {"0", "1"}


def test_a_single_view_is_exported_where_asked_for(run, exported, exported_with_views, paths, tmp_path):
    options = ExportOptions(train_dir=str(run), single_view=True, export_dir=str(tmp_path / "model"))
    saved_model.export_run(options, with_views(run))
    single = tf.saved_model.load(str(tmp_path / "model")).signatures
    plain, mean, single = (
        each["serving_default"](features=tf.constant(pixels(paths)))["logits"].numpy()
        for each in (exported, exported_with_views, single)
    )
    assert not np.allclose(plain, mean) and single.tobytes() == plain.tobytes()


def test_files_and_pixels_give_the_same_bits(exported, paths):
    """Files hold what the pixels are: PNG loses nothing."""
    of_pixels = exported["serving_default"](features=tf.constant(pixels(paths)))
    of_files = exported["files"](files=tf.constant([path.read_bytes() for path in paths]))
    for name in ("logits", "probabilities"):
        assert of_files[name].numpy().tobytes() == of_pixels[name].numpy().tobytes(), name
    exponents = np.exp(of_pixels["logits"].numpy().astype(np.float64))
    np.testing.assert_allclose(
        of_pixels["probabilities"], exponents / exponents.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-30
    )
    names = np.array([name.encode() for name in CLASSES])
    np.testing.assert_array_equal(of_pixels["classes"].numpy(), names[exponents.argmax(axis=1)])
    np.testing.assert_array_equal(of_pixels["all_classes"].numpy(), [names] * 6)


def test_predict_prints_the_top_classes_of_each_file(command, run, exported, paths, tmp_path):
    odd = tmp_path / "a photo ü.jpg"
    Image.fromarray(pixels(paths)[4]).resize((40, 30)).save(odd)
    status, stdout, stderr = command(predict, f"--train_dir={run}", "--top=2", str(paths[3]), str(odd))
    assert (status, stderr) == (0, "")
    first, second = stdout.splitlines()
    probabilities = exported["files"](files=tf.constant([paths[3].read_bytes()]))["probabilities"].numpy()[0]
    order = np.argsort(-probabilities)
    assert first == f"{paths[3]}: {CLASSES[order[0]]} {probabilities[order[0]]:.3f}, " + (
        f"{CLASSES[order[1]]} {probabilities[order[1]]:.3f}"
    )
    assert order[0] == 1, "the network has learned enough for the order to be its own"
    assert second.startswith(f"{odd}: {CLASSES[1]} ")


def test_export_writes_into_the_train_dir_and_never_over_a_folder(command, refusal, run, exported, tmp_path):
    line = refusal(export, f"--train_dir={run}")
    assert f"{run}/export is there already" in line and "--overwrite" in line and "--versioned" in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    line = refusal(export, f"--train_dir={run}", f"--export_dir={tmp_path / 'mine'}", "--overwrite")
    assert "is no SavedModel, so it stays" in line and (tmp_path / "mine" / "file").read_text() == "precious"
    line = refusal(export, f"--train_dir={run}", "--overwrite", "--versioned")
    assert "--overwrite and --versioned exclude each other" in line
    status, stdout, stderr = command(export, f"--train_dir={run}", f"--export_dir={tmp_path / 'new'}")
    assert (status, stderr) == (0, "")
    assert stdout == f"Exported: {tmp_path / 'new'} (signatures serving_default, predict, files)\n"


def logits_of(folder):
    served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return served(features=tf.ones([1, 4]))["logits"].numpy()


def test_an_export_takes_its_place_whole_or_not_at_all(toy_run, tmp_path, monkeypatch):
    def full(builder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(options):
        with monkeypatch.context() as patch, pytest.raises(tower_train.UserError, match="cannot be written .No space"):
            patch.setattr(v1.saved_model.Builder, "save", full)
            saved_model.export_run(options)

    below = tmp_path / "made" / "too"
    options = ExportOptions(train_dir=str(toy_run), export_dir=str(below / "model"))
    fail(options)
    assert list(tmp_path.iterdir()) == []
    saved_model.export_run(options)
    averaged, raw = (
        jobs.toy_logits(jobs.variables(toy_run), np.ones([1, 4], np.float32), suffix)
        for suffix in ("/ExponentialMovingAverage", "")
    )
    np.testing.assert_allclose(logits_of(below / "model"), averaged, rtol=1e-5)
    options = dataclasses.replace(options, overwrite=True, raw=True)
    fail(options)
    np.testing.assert_allclose(logits_of(below / "model"), averaged, rtol=1e-5)
    assert saved_model.export_run(options)[0] == below / "model"
    np.testing.assert_allclose(logits_of(below / "model"), raw, rtol=1e-5)
    assert not np.allclose(averaged, raw) and os.listdir(below) == ["model"]


def test_versions_are_numbered_upwards_and_appear_whole(command, refusal, toy_run, tmp_path, monkeypatch):
    """As TensorFlow Serving finds them: it takes the folder with the greatest number, and passes over other names."""
    base, words = tmp_path / "served", ["--versioned", f"--export_dir={tmp_path / 'served'}", f"--train_dir={toy_run}"]
    before, seen = time.time(), []
    save = v1.saved_model.Builder.save
    monkeypatch.setattr(v1.saved_model.Builder, "save", lambda builder: (seen.append(os.listdir(base)), save(builder)))
    for _ in range(2):  # within a second
        status, stdout, stderr = command(export, *words)
        assert (status, stderr) == (0, "")
    versions = sorted(os.listdir(base), key=int)  # and nothing else
    assert len(versions) == 2 and before - 1 <= int(versions[0]) <= time.time() + 2
    assert stdout.startswith(f"Exported: {base / versions[-1]} (")
    assert [sum(name.isdecimal() for name in names) for names in seen] == [0, 1]
    assert tf.saved_model.load(str(base / versions[-1])).signatures
    line = refusal(export, *words[:1], f"--export_dir={base / versions[0]}", words[2])
    assert "is a SavedModel itself, and no folder of versions" in line


def test_predict_names_files_that_it_cannot_use_and_predicts_on_the_others(command, refusal, run, paths, tmp_path):
    names = [str(tmp_path / "text.jpg"), str(tmp_path / "none.jpg"), str(paths[0]), str(tmp_path / "cut.npy")]
    (tmp_path / "text.jpg").write_text("hello")
    np.save(names[3], np.zeros([2, 3]))
    status, stdout, stderr = command(predict, f"--train_dir={run}", *names)
    assert status == 2 and stdout.startswith(f"{names[2]}: ") and stdout.count("\n") == 1
    first, second, third = stderr.splitlines()
    assert f"{names[1]}: cannot be read: No such file" in first and f"{names[3]}: " in third
    assert f"{names[0]}: is no JPEG, PNG, GIF, BMP or WebP image" in second
    assert "No file is named" in refusal(predict, f"--train_dir={run}")
    assert "/: cannot be read: Is a directory" in refusal(predict, f"--train_dir={run}", "/")


def test_exported_networks_decode_photographs_as_training_does():
    """To the bit where nothing is resized and one channel is read, else to the next of 255 (libjpeg's exact DCT)."""
    rng = np.random.default_rng(0)
    for size, most in ((16, 0), (50, 1)):
        content = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, [size, size], np.uint8)).save(content, "jpeg")
        with tf.Graph().as_default(), v1.Session() as session:
            served = session.run(serving._decoded(tf.constant(content.getvalue()), 16, 16, 1)).astype(int)
        assert np.abs(served - decoding.decode(content.getvalue(), 16, 16, 1)).max() <= most
