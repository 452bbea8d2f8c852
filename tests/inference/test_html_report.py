"""The report of a run as one HTML file: what it tells, also of a run that trains."""

import base64
import dataclasses
import html
import io
import json
import re
import shutil

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import toy_workload
from PIL import Image

import tower_train
from tower_train import errors, report
from tower_train.config import Config, RunOptions
from tower_train.data import tf_data
from tower_train.inference import hardest, html_report, saved_run, serving
from tower_train.run_dir import directory


@pytest.fixture(scope="module")
def page(image_run):
    assert report.main(["report", str(image_run)]) == 0
    return (image_run / "report.html").read_text(encoding="utf-8")


def words(text):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text.partition("</style>")[2])).split())


def test_it_tells_the_results_options_data_and_versions_of_a_run(image_run, page):
    result, run_json = (jobs.read_json(image_run, f"{name}.json") for name in ("result", "run"))
    told = words(page)
    metric = result["evaluation"]["metrics"]["precision @ 1"]
    assert f"precision @ 1 {metric['mean']:.4g} {metric['low']:.3f} to {metric['high']:.3f} 6 test 8" in told
    assert "Done: step 8" in told and "blåu 10 rød 10" in told and "--image_size 32" in told
    for name, version in run_json["versions"].items():
        assert f"{name} {version}" in told
    cells = [int(cell) for cell in re.findall(r"--share:[\d.]+'>(\d+)", page)]
    assert cells == [count for row in result["evaluation"]["confusion"] for count in row]
    assert len(page) < 1_000_000 and not re.search(r"https?:|src='(?!data:)|<script|url\(", page)
    assert (page.count("<polyline"), page.count("<img")) == (4, 6) and "color-scheme: light dark" in page


def test_its_pictures_are_the_test_images_of_the_highest_losses(image_run, page, data):
    built, session = serving.open_run(RunOptions(train_dir=str(image_run)))
    paths = sorted((data / "test").glob("*/*.png"))
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    with session:
        logits = session.run(built.outputs["logits"], {built.features["features"]: images}).astype(np.float64)
    labels = np.array([0, 0, 0, 1, 1, 1])
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(6), labels]
    told = [float(loss) for loss in re.findall(r"<small>loss ([\d.e+-]+)", page)]
    np.testing.assert_allclose(told, sorted(losses, reverse=True), rtol=2e-3)
    shown = [Image.open(io.BytesIO(base64.b64decode(each))) for each in re.findall("base64,([^']+)", page)]
    worst = Image.fromarray(images[losses.argmax()]).resize(shown[0].size, 0)
    np.testing.assert_array_equal(np.asarray(shown[0]), np.asarray(worst))


def test_a_run_is_told_of_before_its_first_checkpoint_and_while_it_trains(tmp_path, capsys):
    seen = []

    def look(step, _):
        if step in (2, 7):
            report.main(["report", str(tmp_path / "run"), "--workload=toy_workload"])
            seen.append(words((tmp_path / "run" / "report.html").read_text(encoding="utf-8")))

    config = Config(train_dir=str(tmp_path / "run"), max_steps=9, batch_size=8, log_every_steps=1, eval_every_steps=4)
    tower_train.train(
        toy_workload.WORKLOAD, dataclasses.replace(config, num_gpus=2, summary_every_steps=0), after_step=look
    )
    early, later = seen
    assert "It trains" in early and "No evaluation yet" in early and "Not known: " in early and "no checkpoint" in early
    assert "It trains, this is how far it was: step 7" in later and "Of 50 examples of toy test." in later
    assert "2 equal 1 on this network" in later
    assert re.search(r"precision @ 1 [\d.]+ 4 ", later)
    with pytest.raises(
        errors.ConfigError, match="run.json is there, and was not written by this command. Move it away"
    ):
        report.main(["report", str(tmp_path / "run"), f"--out={tmp_path / 'run' / 'run.json'}"])


@pytest.mark.parametrize("kind", ["several", "elements"])
def test_losses_of_any_workload_are_those_of_its_examples_alone(kind, tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=[30, 3]).astype(np.float32)
    labels = np.int64(features[:, :2] > 0) if kind == "several" else features[:, 0]

    def examples(request):
        if kind == "elements":

            def make():
                slices = tf.data.Dataset.from_tensor_slices((features, labels))
                return slices.repeat() if request.split == "train" else slices

            return tf_data.examples("mine", make, 30)
        return tower_train.Examples.from_arrays("mine", features, labels, ["a", "b"])

    loss = keras.losses.BinaryCrossentropy(from_logits=True) if kind == "several" else tower_train.mean_squared_error
    metrics = [keras.metrics.MeanSquaredError()] if kind == "several" else tower_train.regression_metrics
    outputs = 2 if kind == "several" else 1
    made = tower_train.Workload(
        "mine", examples, lambda x, training: toy_workload.layer("layer", x, outputs), loss, metrics
    )
    tower_train.train(
        made, made.config(train_dir=str(tmp_path), max_steps=1, ema=0.0, batch_size=10, check_towers="never")
    )
    run = saved_run.read(RunOptions(train_dir=str(tmp_path)), made)
    count, _, found = hardest.hardest(run, 5)
    values = jobs.variables(tmp_path, 1)
    given = features @ values["layer/weights"] + values["layer/biases"]
    if kind == "several":
        losses = (np.log1p(np.exp(-np.abs(given))) + np.maximum(given, 0) - given * labels).mean(axis=1)
    else:
        losses = (given[:, 0] - labels) ** 2
    assert count == 30
    np.testing.assert_allclose([each.loss for each in found], np.sort(losses)[::-1][:5], rtol=1e-4)
    assert all(each.picture is None and each.words for each in found)


def test_what_a_stranger_wrote_is_text(image_run, tmp_path):
    copy = shutil.copytree(image_run, tmp_path / "<b>")
    run_json = jobs.read_json(copy, "run.json")
    run_json |= {"workload": "<script>alert(1)</script>", "devices": ["<img src=x>"]}
    run_json["data"]["class_names"] = ["<i>", "'"]
    (copy / "run.json").write_text(json.dumps(run_json))
    text = html_report.render(directory.RunDirectory(str(copy)), "<u>")
    assert not re.search("<(script|img|i|u|b)>|<img src=x", text)
