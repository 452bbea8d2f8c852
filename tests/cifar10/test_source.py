"""The images of a run: where they lie, from a real HTTP server that is good, wrong, slow or hostile, or drawn."""

import functools
import hashlib
import http.server
import io
import os
import re
import shutil
import tarfile
import threading
import time

import pytest

from cifar10 import generated, records, source
from tower_train import errors, files
from tower_train.data import remote
from tower_train.workload import DataRequest

FILES = [*records.ALL_FILES, records.CLASS_NAMES_FILE]
DOWNLOAD = source.download  # which most tests replace
NOWHERE = "http://127.0.0.1:1/cifar-10-binary.tar.gz"  # a port where nobody listens


@pytest.fixture(autouse=True)
def default_dir(tmp_path, monkeypatch):
    """The default data directory, empty; a download fails as it does without a network."""
    monkeypatch.setenv("TOWER_TRAIN_DATA", str(tmp_path / "default"))
    nowhere = remote.RemoteFile(NOWHERE, DIGEST)
    monkeypatch.setattr(source, "download", functools.partial(DOWNLOAD, archive=nowhere))
    return tmp_path / "default"


@pytest.fixture
def network(cifar10_dir, monkeypatch):
    """A download that works: it copies the small CIFAR-10 to where the real one unpacks. Lists what was asked for."""
    asked = []

    def copy(directory, **timeouts):
        asked.append(directory)
        return shutil.copytree(cifar10_dir, directory / source.FOLDER)

    monkeypatch.setattr(source, "download", copy)
    return asked


@pytest.fixture
def drawn(default_dir, monkeypatch):
    """The default directory, in which a few images will be drawn."""
    monkeypatch.setattr(generated, "IMAGES_PER_FILE", 20)
    return default_dir


@pytest.mark.parametrize(
    ("dataset", "named", "below"),
    [
        ("auto", False, ""),
        ("auto", True, source.FOLDER),
        ("cifar10", True, ""),
        ("auto", False, None),
        ("cifar10", False, None),
        ("cifar10", True, None),
    ],
)
def test_cifar10_is_used_where_it_lies_or_downloaded_once(
    network, cifar10_dir, default_dir, tmp_path, dataset, named, below
):
    """below: its place in the directory; None: it is not there."""
    directory = tmp_path / "named" if named else default_dir
    if below is not None:
        shutil.copytree(cifar10_dir, directory / below)
    for split, count in (("train", 200), ("test", 40)):
        examples = source.examples(DataRequest(split, dataset, str(directory) if named else None))
        assert (examples.name, examples.num_examples, examples.dataset) == (f"CIFAR-10 {split}", count, "cifar10")
        assert examples.fingerprint == records.read_split(cifar10_dir, split).fingerprint
        assert examples.notice is None and examples.class_names == records.CLASS_NAMES
    assert network == ([directory] if below is None else [])


def test_auto_falls_back_to_drawn_images_and_says_why_and_what_to_do(drawn, monkeypatch):
    train = source.examples(DataRequest("train"))
    monkeypatch.setattr(source, "download", pytest.fail)
    test = source.examples(DataRequest("test"))
    assert [each.name for each in (train, test)] == ["generated train", "generated test"]
    assert train.dataset == test.dataset == "generated" and train.notice == test.notice
    assert train.class_names == generated.CLASS_NAMES
    assert "\n" not in train.notice and train.notice.startswith("NOT CIFAR-10")
    assert f"because CIFAR-10 could not be downloaded: URL fetch failure on {NOWHERE}: " in train.notice
    assert f"into {drawn / source.FOLDER}. Precision on them says nothing" in train.notice


def test_generated_never_asks_the_network_and_is_the_same_for_every_seed(network, drawn):
    first, other = (source.examples(DataRequest("test", "generated", seed=seed)) for seed in (0, 5))
    assert first.fingerprint == other.fingerprint == records.read_split(drawn / "generated-0", "test").fingerprint
    assert (first.name, first.dataset) == ("generated test", "generated")
    assert first.notice.startswith("NOT CIFAR-10") and "--dataset=generated" in first.notice
    assert network == []


def test_what_is_not_there_or_not_whole_is_an_error_and_no_download(network, cifar10_dir, tmp_path):
    request = DataRequest("train", "auto", str(tmp_path))
    with pytest.raises(errors.DataError, match=f"^--data_dir={tmp_path}: neither .*--dataset=cifar10.*=generated"):
        source.examples(request)
    shutil.copytree(cifar10_dir, tmp_path, dirs_exist_ok=True)
    for name in ("data_batch_4.bin", "test_batch.bin"):
        (tmp_path / name).unlink()
    with pytest.raises(errors.DataError, match="incomplete, data_batch_4.bin, test_batch.bin missing"):
        source.examples(request)
    assert network == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TOWER_TRAIN_DATA": "/data", "XDG_CACHE_HOME": "/cache"}, "/data"),
        ({"TOWER_TRAIN_DATA": "~/data"}, "/home/me/data"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/tower_train"),
        ({"TOWER_TRAIN_DATA": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/tower_train"),
    ],
)
def test_default_directory_follows_the_environment(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", {"HOME": "/home/me"} | environment)
    assert str(files.data_directory()) == expected


def _packed():
    """The official archive's files, one record each, the directory and the page that lie beside them."""
    members = [(name, bytes([i]) * 3073) for i, name in enumerate(FILES)] + [("readme.html", b"<html>")]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        folder = tarfile.TarInfo(source.FOLDER)
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in members:
            member = tarfile.TarInfo(f"{source.FOLDER}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


GOOD = _packed()
DIGEST = hashlib.sha256(GOOD).hexdigest()


class _Server(http.server.ThreadingHTTPServer):
    """Answers GET with `body` up to `sent`, in two halves; waits for `gap` before the second."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.status, self.sent, self.requests = GOOD, 200, None, 0
        self.gap = threading.Event()
        self.gap.set()

    def handle_error(self, request, client_address):
        """A client that hangs up is part of the tests."""

    def archive(self, checksum=None):
        return remote.RemoteFile(f"http://127.0.0.1:{self.server_port}/small.tar.gz", checksum or DIGEST)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        server, half = self.server, len(self.server.body) // 2
        server.requests += 1
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body[:half])
        server.gap.wait(20)
        self.wfile.write(server.body[half : server.sent])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.gap.set()
        server.shutdown()
        thread.join()


def test_the_files_and_nothing_else_are_unpacked_and_kept(server, tmp_path):
    for _ in range(2):
        folder = DOWNLOAD(tmp_path / "new", server.archive())
        assert folder == tmp_path / "new" / "cifar-10-batches-bin" and sorted(os.listdir(folder)) == sorted(FILES)
        assert [(folder / name).read_bytes() for name in FILES] == [bytes([i]) * 3073 for i in range(len(FILES))]
    assert server.requests == 1 and os.listdir(tmp_path / "new") == ["cifar-10-batches-bin"]


@pytest.mark.parametrize(
    "attributes, archive, reason",
    [
        (dict(status=404), {}, "404 -- Not Found"),
        (dict(sent=-100), {}, f"got only {len(GOOD) - 100} out of {len(GOOD)} bytes"),
        (dict(body=GOOD[:-1] + b"?"), {}, "Incomplete or corrupted file detected"),
        ({}, dict(checksum="0" * 32), "the provided value of 000"),
        (dict(gap=threading.Event()), {}, "timed out"),
    ],
    ids=["status", "cut off", "damaged", "other", "stalled"],
)
def test_a_failure_is_one_line_within_seconds_and_leaves_nothing(server, tmp_path, attributes, archive, reason):
    for name, value in attributes.items():
        setattr(server, name, value)
    started, archive = time.monotonic(), server.archive(**archive)
    with pytest.raises(errors.DataError) as raised:
        DOWNLOAD(tmp_path, archive, timeout_secs=0.3 if reason == "timed out" else 4.0)
    assert time.monotonic() - started < 5
    text = str(raised.value)
    assert "\n" not in text and re.search(f"could not be downloaded: .*{reason}", text), text
    assert f"put its files (data_batch_1.bin to test_batch.bin) into {tmp_path}/{source.FOLDER}." in text
    assert os.listdir(tmp_path) == []


def test_files_that_are_in_the_way_are_left_alone(server, tmp_path):
    (tmp_path / source.FOLDER).mkdir()
    (tmp_path / source.FOLDER / "mine").write_text("precious")
    with pytest.raises(errors.DataError, match="is in the way"):
        DOWNLOAD(tmp_path, server.archive())
    assert (tmp_path / source.FOLDER / "mine").read_text() == "precious" and server.requests == 0
