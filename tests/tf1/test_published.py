"""The programs of four articles run by `python -m tower_train.tf1` with no line edited, in two towers."""

import ast
import re
import shutil

import idx_files
import jobs
import numpy as np
import pytest
import tensorflow as tf

PROGRAMS = jobs.TESTS / "tf1" / "programs"


def run(program, *words, cwd, **variables):
    """Runs a program by the command; returns what it printed and what it said on stderr."""
    done = jobs.command("tower_train.tf1", str(PROGRAMS / program), *map(str, words), cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_keras_on_two_gpus_trains_as_on_one_and_saves_the_template(tmp_path):
    shown, said = run("keras_on_gpus.py", 2, "sgd", cwd=tmp_path)
    assert "2 towers on the CPU" in said and "2 equal 1 on this network" in shown
    first, second = ast.literal_eval(re.search(r"losses (\[.*?\]) of 2", shown)[1])
    assert 0 < second < first
    assert (tmp_path / "my_model.h5").stat().st_size > 1e6


@pytest.fixture
def batches(tmp_path):
    for i in (1, 2):
        records = np.random.default_rng(i).integers(0, 256, [60, 3073], np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / f"data_batch_{i}.bin")
    return tmp_path


def test_a_loop_over_towers_trains_prints_and_saves(batches):
    words = ["--num_gpus=2", "--batch_size=4", "--max_steps=21", f"--data_dir={batches}", f"--train_dir={batches}/run"]
    shown, said = run("cifar10_multi_gpu_train.py", *words, cwd=batches)
    lines = shown.splitlines()
    assert [int(re.search(r"step (\d+), loss = \d+\.\d\d \(", line)[1]) for line in lines] == [0, 10, 20]
    assert "There is no GPU here" in said
    saved = tf.train.load_checkpoint(str(batches / "run" / "model.ckpt-21"))
    assert saved.get_tensor("global_step") == 21
    assert "conv1/weights/ExponentialMovingAverage" in saved.get_variable_to_shape_map()


def test_the_pages_workload_of_the_loops_own_files_trains_in_two_towers_what_one_trains(batches):
    page = (jobs.ROOT / "docs" / "migration.md").read_text()
    (batches / "towers.py").write_text(re.search(r"```python\n(\"\"\"The tutorial's .*?)```", page, re.DOTALL)[1])
    for name in ("cifar10.py", "cifar10_input.py"):
        shutil.copy(PROGRAMS / name, batches)
    shown = []
    for towers in (2, 1):
        words = ["--workload=towers", f"--data_dir={batches}", "--max_steps=3", f"--num_gpus={towers}", "--seed=1"]
        words += [f"--batch_size={8 // towers}", f"--train_dir=run{towers}", "--log_every_steps=1"]
        done = jobs.command("tower_train", *words, cwd=batches)
        assert done.returncode == 0, done.stderr
        shown.append(re.findall(r"step \d, loss = [\d.]+", done.stdout))
    assert shown[0] == shown[1] and len(shown[0]) == 3
    weights = [jobs.variables(batches / f"run{towers}")["conv1/weights"] for towers in (1, 2)]
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-7)  # in float32


def test_an_estimator_trains_in_two_towers_what_one_device_trains(tmp_path):
    idx_files.write(tmp_path, num_test=16)
    shown, said = run("fashion_estimator.py", tmp_path, 2, 8, cwd=tmp_path)
    alone, _ = run("fashion_estimator.py", tmp_path, 1, 16, cwd=tmp_path)
    assert "2 towers on the CPU" in said and re.search(r"images/second with 2 GPUs", shown)
    of_towers, train_one = (eval(text.splitlines()[-1], {"np": np}) for text in (shown, alone))
    assert of_towers["global_step"] == train_one["global_step"] == 6  # 48 images, 2 epochs
    np.testing.assert_allclose(of_towers["loss"], train_one["loss"], rtol=1e-5)


def test_an_estimator_trains_on_folders_through_contrib(tmp_path):
    for split, count in (("train", 4), ("test", 1)):
        for number, label in enumerate(["CNV", "DME", "DRUSEN", "NORMAL"] * count):
            folder = tmp_path / split / label
            folder.mkdir(parents=True, exist_ok=True)
            image = np.full([40, 50, 1], 15 * number, np.uint8)
            (folder / f"{label}-{number}.jpeg").write_bytes(tf.io.encode_jpeg(image).numpy())
    shown, said = run("oct_estimator.py", tmp_path, cwd=tmp_path)
    assert "2 towers on the CPU" in said and " examples, float64" in shown
    assert eval(shown.splitlines()[-1], {"np": np})["global_step"] == 2  # 16 images by twos of 4
