"""A user's own cifar10.py, the tutorial's companion file, beside our package of that name; and flags in networks."""

import jobs
import pytest

COMPANION = """
from absl import flags
flags.DEFINE_integer("batch_size", 128, "Images in a batch.")
flags.DEFINE_integer("hidden", 3, "Units.")
FLAGS = flags.FLAGS
"""
WORKLOAD = """
import cifar10, numpy as np, tensorflow as tf, tower_train
v1 = tf.compat.v1

def examples(request):
    return tower_train.Examples.from_arrays("toy", np.ones([40, 2], np.float32), np.arange(40) % 2)

def inference(features, training):
    print("hidden", cifar10.FLAGS.hidden, "batch", cifar10.FLAGS.batch_size)
    return tf.matmul(features, v1.get_variable("w", [2, 2]))

WORKLOAD = tower_train.Workload("toy", examples, inference)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cifar10.py").write_text(COMPANION)
    (tmp_path / "mine.py").write_text(WORKLOAD)
    return tmp_path


WORDS = ["--max_steps=1", "--batch_size=8", "--train_dir=run", "--check_towers=never"]


def test_ours_trains_beside_a_companion_of_that_name(folder):
    done = jobs.command("tower_train", *WORDS, "--dataset=generated", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "cifar10_94" in jobs.command("tower_train", "--recipe=cifar10_94", "--help", cwd=folder).stdout


@pytest.mark.parametrize("words", [["--workload=mine"], []])
def test_a_workloads_companion_is_the_users_or_itself_one_and_its_flags_have_the_command_lines_values(folder, words):
    if not words:
        workload = WORKLOAD.replace("import cifar10, ", "import ").replace("cifar10.", "")
        (folder / "cifar10.py").write_text(COMPANION + workload)
    done = jobs.command("tower_train", *WORDS, *words, cwd=folder)
    assert done.returncode == 0 and "hidden 3 batch 8" in done.stdout, done.stderr
