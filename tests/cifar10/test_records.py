"""The binary format: bytes in, images and labels out, and one line for every way a file can be wrong; drawn images."""

import hashlib
import os
import pathlib
import subprocess
import sys

import jobs
import numpy as np
import pytest
import values

from cifar10 import generated, records
from tower_train import errors


@pytest.mark.parametrize("counts", [[1], [999, 1000, 1001]])
def test_files_of_any_length_follow_one_another(tmp_path, counts):
    stored = np.random.default_rng(0).integers(0, 256, [sum(counts), 3073], np.uint8)
    stored[:, 0] %= 10
    paths = [tmp_path / f"{i}.bin" for i in range(len(counts))]
    for path, part in zip(paths, np.split(stored, np.cumsum(counts)[:-1]), strict=True):
        part.tofile(path)
    read = records.read(paths)
    assert read.labels.dtype == np.int32 and read.images.dtype == np.uint8
    np.testing.assert_array_equal(read.labels, stored[:, 0])
    np.testing.assert_array_equal(read.images, stored[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def test_examples_are_those_of_the_published_files_by_index(cifar10_dir):
    for split, names in (("train", [f"data_batch_{i}.bin" for i in range(1, 6)]), ("test", ["test_batch.bin"])):
        stored = np.concatenate([np.fromfile(cifar10_dir / name, np.uint8) for name in names]).reshape(-1, 3073)
        examples, indices = records.examples(cifar10_dir, split, "small"), [len(stored) - 1, 0, 31, 31]
        images, labels = values.fetched(examples, indices)
        np.testing.assert_array_equal(images, stored[indices, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(labels, stored[indices, 0])
        assert labels.dtype == np.int32
        assert (examples.name, examples.num_examples) == (f"small {split}", len(stored))
        np.testing.assert_array_equal(examples.labels, stored[:, 0])


def _spoil_label(path):
    data = bytearray(path.read_bytes())
    data[1003 * 3073] = 10
    path.write_bytes(data)


def _replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda path: path.write_bytes(bytes(2 * 3073 + 100)), "has 6246 bytes; the CIFAR-10 binary format has 3073"),
        (_spoil_label, "record 1003 has label 10; labels are 0 to 9"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (pathlib.Path.unlink, "cannot be read: No such file"),
        (_replace_by_folder, "cannot be read: Is a directory"),
    ],
)
def test_damage_is_told_with_its_place(tmp_path, damage, text):
    paths = [tmp_path / "data_batch_1.bin", tmp_path / "data_batch_2.bin"]
    for path in paths:
        path.write_bytes(bytes(1200 * 3073))
    damage(paths[1])
    with pytest.raises(errors.DataError, match=f"^{paths[1]}: .*{text}") as raised:
        records.read(paths)
    assert "\n" not in str(raised.value)


def test_class_names_come_from_the_file_if_it_is_there(tmp_path):
    assert records.class_names(tmp_path) == records.CLASS_NAMES
    ten = tuple(f"class {i}" for i in range(10))
    (tmp_path / "batches.meta.txt").write_text("\n".join(ten) + "\n\n")
    assert records.class_names(tmp_path) == ten


# Pinned: results on these images are compared between versions of Python, NumPy and this package.
DIGEST_OF_200 = "3062a0ff835c2e81af63bc02d58cf102a0dfc874ab4cf42c9d509474b94154a1"
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
