"""The drawn images: the same for everyone, and complete."""

import hashlib
import os
import subprocess
import sys

import jobs
import numpy as np

from cifar10 import generated, records

# Pinned: results on these images are compared between versions of Python, NumPy and this package.
DIGEST_OF_200 = "7c0a3fff2def1c5e689bfedea0a8c2b72a76fbc9a0b1085fdb55040941117752"
WITHOUT_TENSORFLOW = """
import hashlib, sys, types
package = sys.modules["cifar10"] = types.ModuleType("cifar10")
package.__path__, package.records = [sys.argv[1]], types.SimpleNamespace(IMAGE_SIZE=32, CHANNELS=3)
from cifar10 import generated
assert "tensorflow" not in sys.modules
print(hashlib.sha256(generated.draw(200, seed=7)[0].tobytes()).hexdigest())
"""


def test_images_are_the_same_on_every_machine_whatever_its_vector_units():
    here = hashlib.sha256(generated.draw(200, seed=7)[0].tobytes()).hexdigest()
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    environment = jobs.environment() | {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}
    words = [sys.executable, "-c", WITHOUT_TENSORFLOW, str(jobs.ROOT / "cifar10")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert [here, done.stdout.strip()] == [DIGEST_OF_200] * 2


def test_files_are_those_of_cifar10_with_balanced_classes_and_drawn_again_if_damaged(tmp_path, monkeypatch):
    assert generated.IMAGES_PER_FILE == 2000
    monkeypatch.setattr(generated, "IMAGES_PER_FILE", 60)
    folder = generated.generate(tmp_path)
    assert folder.name == "generated-0"
    assert sorted(os.listdir(folder)) == sorted([*records.ALL_FILES, "batches.meta.txt"])
    train, test = records.read_split(folder, "train"), records.read_split(folder, "test")
    assert np.bincount(train.labels).tolist() == [30] * 10 and np.bincount(test.labels).tolist() == [6] * 10
    assert len({image.tobytes() for image in np.concatenate([train.images, test.images])}) == 360
    assert records.class_names(folder) == generated.CLASS_NAMES and len(set(generated.CLASS_NAMES)) == 10
    images, labels = generated.draw(60, seed=0, stream=5)
    np.testing.assert_array_equal(test.labels, labels)
    np.testing.assert_array_equal(test.images, images.transpose(0, 2, 3, 1))

    before = (folder / "test_batch.bin").stat().st_mtime_ns
    assert generated.generate(tmp_path) == folder
    assert (folder / "test_batch.bin").stat().st_mtime_ns == before, "what is whole is kept"
    os.truncate(folder / "data_batch_3.bin", 3073)
    generated.generate(tmp_path)
    assert records.read_split(folder, "train").fingerprint == train.fingerprint
