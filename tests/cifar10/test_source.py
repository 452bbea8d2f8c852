"""The images of a run, for every combination of --dataset, --data_dir and what lies there."""

import functools
import shutil
import time

import pytest

from cifar10 import download, generated, records, source
from tower_train import errors
from tower_train.data import directories, remote
from tower_train.workload import DataRequest

URL = "http://127.0.0.1:1/cifar-10-binary.tar.gz"  # a port where nobody listens


@pytest.fixture(autouse=True)
def default_dir(tmp_path, monkeypatch):
    """The default data directory, empty; a download fails as it does without a network."""
    monkeypatch.setenv("TOWER_TRAIN_DATA", str(tmp_path / "default"))
    nowhere = remote.RemoteFile(URL, num_bytes=1, checksum=("md5", ""))
    monkeypatch.setattr(download, "download", functools.partial(download.download, archive=nowhere))
    return tmp_path / "default"


@pytest.fixture
def network(cifar10_dir, monkeypatch):
    """A download that works: it copies the small CIFAR-10 to where the real one unpacks. Lists what was asked for."""
    asked = []

    def copy(directory, **timeouts):
        asked.append(directory)
        return shutil.copytree(cifar10_dir, directory / download.FOLDER)

    monkeypatch.setattr(download, "download", copy)
    return asked


@pytest.fixture(scope="module")
def drawn_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drawn")
    generated.generate(directory)
    return directory


def _fingerprint(directory, split="train"):
    return records.read_split(directory, split).fingerprint


@pytest.mark.parametrize(
    ("dataset", "named", "below"), [("auto", False, ""), ("auto", True, download.FOLDER), ("cifar10", True, "")]
)
def test_cifar10_is_used_where_it_lies(cifar10_dir, default_dir, tmp_path, dataset, named, below):
    directory = tmp_path / "named" if named else default_dir
    shutil.copytree(cifar10_dir, directory / below)
    for split, count in (("train", 200), ("test", 40)):
        examples = source.examples(DataRequest(split, dataset, str(directory) if named else None))
        assert (examples.name, examples.num_examples, examples.dataset) == (f"CIFAR-10 {split}", count, "cifar10")
        assert examples.fingerprint == _fingerprint(cifar10_dir, split)
        assert examples.notice is None and examples.class_names == records.CLASS_NAMES


@pytest.mark.parametrize("dataset, named", [("auto", False), ("cifar10", False), ("cifar10", True)])
def test_cifar10_is_downloaded_once_where_it_is_missing(network, default_dir, tmp_path, dataset, named):
    directory = tmp_path / "named" if named else default_dir
    for split in ("train", "test"):
        examples = source.examples(DataRequest(split, dataset, str(directory) if named else None))
        assert (examples.name, examples.dataset, examples.notice) == (f"CIFAR-10 {split}", "cifar10", None)
    assert network == [directory]


def test_auto_falls_back_to_drawn_images_and_says_why_and_what_to_do(default_dir, drawn_dir):
    shutil.copytree(drawn_dir, default_dir)
    examples = source.examples(DataRequest("train"))
    assert (examples.name, examples.dataset) == ("generated train", "generated")
    assert examples.fingerprint == _fingerprint(drawn_dir / "generated-0")
    assert examples.class_names == generated.CLASS_NAMES
    assert "\n" not in examples.notice and examples.notice.startswith("NOT CIFAR-10")
    assert f"because CIFAR-10 could not be downloaded from {URL}: Connection refused." in examples.notice
    assert f"into {default_dir / download.FOLDER}. Precision on them says nothing" in examples.notice


def test_auto_waits_for_the_network_once(default_dir, drawn_dir, monkeypatch):
    shutil.copytree(drawn_dir, default_dir)
    calls = []

    def slow(directory, timeout_secs):
        calls.append(timeout_secs)
        time.sleep(0.01)
        raise errors.DataError("no answer")

    monkeypatch.setattr(download, "download", slow)
    train, test = (source.examples(DataRequest(split)) for split in ("train", "test"))
    assert len(calls) == 1 and calls[0] <= 5
    assert train.dataset == test.dataset == "generated" and train.notice == test.notice


@pytest.mark.parametrize("seed", [0, 5])
def test_generated_never_asks_the_network_and_is_the_same_for_every_seed(network, drawn_dir, seed):
    examples = source.examples(DataRequest("test", "generated", str(drawn_dir), seed))
    assert examples.fingerprint == _fingerprint(drawn_dir / "generated-0", "test")
    assert (examples.name, examples.dataset) == ("generated test", "generated")
    assert examples.notice.startswith("NOT CIFAR-10") and "--dataset=generated" in examples.notice
    assert network == []


def test_a_named_directory_without_cifar10_is_an_error_not_a_download(network, drawn_dir):
    with pytest.raises(errors.DataError, match=f"^--data_dir={drawn_dir}: neither .*--dataset=cifar10.*=generated"):
        source.examples(DataRequest("train", "auto", str(drawn_dir)))
    assert network == []


@pytest.mark.parametrize(("dataset", "named"), [("auto", True), ("cifar10", False)])
def test_half_of_cifar10_is_an_error_that_names_what_is_missing(network, cifar10_dir, default_dir, dataset, named):
    shutil.copytree(cifar10_dir, default_dir)
    for name in ("data_batch_4.bin", "test_batch.bin"):
        (default_dir / name).unlink()
    with pytest.raises(errors.DataError, match="incomplete, data_batch_4.bin, test_batch.bin missing"):
        source.examples(DataRequest("train", dataset, str(default_dir) if named else None))
    assert network == []


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"TOWER_TRAIN_DATA": "/data", "XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/data"),
        ({"TOWER_TRAIN_DATA": "~/data", "HOME": "/home/me"}, "/home/me/data"),
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/tower_train"),
        ({"TOWER_TRAIN_DATA": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/tower_train"),
    ],
)
def test_default_directory_follows_the_environment(monkeypatch, environment, expected):
    for name in ("TOWER_TRAIN_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(directories.default_directory()) == expected


def test_cifar10_that_cannot_be_had_is_an_error(tmp_path):
    with pytest.raises(errors.DataError, match="could not be downloaded.*put its files"):
        source.examples(DataRequest("train", "cifar10"))
