"""The drawn images: the same for everyone, and complete."""

import os
import subprocess
import sys

import jobs
import numpy as np
import pytest

from cifar10 import generated, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return generated.generate(tmp_path_factory.mktemp("drawn"))


def test_files_are_those_of_cifar10_with_balanced_classes(folder):
    assert folder.name == "generated-0"
    assert sorted(os.listdir(folder)) == sorted([*records.ALL_FILES, "batches.meta.txt"])
    train, test = records.read_split(folder, "train"), records.read_split(folder, "test")
    assert np.bincount(train.labels).tolist() == [1000] * 10
    assert np.bincount(test.labels).tolist() == [200] * 10
    assert len({image.tobytes() for image in np.concatenate([train.images, test.images])}) == 12_000
    assert records.class_names(folder) == generated.CLASS_NAMES and len(set(generated.CLASS_NAMES)) == 10


def test_reader_sees_what_was_drawn(folder):
    images, labels = generated.draw(generated.IMAGES_PER_FILE, seed=0, stream=len(records.ALL_FILES) - 1)
    test = records.read_split(folder, "test")
    np.testing.assert_array_equal(test.labels, labels)
    np.testing.assert_array_equal(test.images, images.transpose(0, 2, 3, 1))


# Pinned: results on these images are compared between versions of Python, NumPy and this package.
_DIGEST_OF_200 = "7c0a3fff2def1c5e689bfedea0a8c2b72a76fbc9a0b1085fdb55040941117752"
_DIGEST_SCRIPT = """
import hashlib
from cifar10 import generated
digest = hashlib.sha256(generated.draw(200, seed=7)[0].tobytes()).hexdigest()
print(digest)
"""


def test_images_are_the_same_on_every_machine_whatever_its_vector_units():
    exec(_DIGEST_SCRIPT, here := {})
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    environment, command = jobs.environment() | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}, [sys.executable, "-c"]
    done = subprocess.run([*command, _DIGEST_SCRIPT], capture_output=True, text=True, check=True, env=environment)
    assert [here["digest"], done.stdout.strip()] == [_DIGEST_OF_200] * 2


def test_what_exists_is_kept_and_what_is_damaged_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "IMAGES_PER_FILE", 20)
    made = generated.generate(tmp_path)
    drawn = records.read_split(made, "train").fingerprint
    before = (made / "test_batch.bin").stat().st_mtime_ns
    assert generated.generate(tmp_path) == made
    assert (made / "test_batch.bin").stat().st_mtime_ns == before
    os.truncate(made / "data_batch_3.bin", 3073)
    generated.generate(tmp_path)
    assert records.read_split(made, "train").fingerprint == drawn
