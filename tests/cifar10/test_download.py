"""Downloads from a real HTTP server on this machine: good, wrong, slow, cut off, hostile, killed."""

import hashlib
import http.server
import io
import os
import re
import tarfile
import threading
import time

import pytest

from cifar10 import download, records
from tower_train import errors
from tower_train.data import remote

FILES = [*records.ALL_FILES, records.CLASS_NAMES_FILE]


def _member(name, content=b"", **attributes):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member, content


def _good_members():
    """The files of the official archive, one record each, the directory and the page that lie beside them."""
    directory = _member(download.FOLDER, type=tarfile.DIRTYPE)
    files = [_member(f"{download.FOLDER}/{name}", bytes([i]) * 3073) for i, name in enumerate(FILES)]
    return [directory, *files, _member(f"{download.FOLDER}/readme.html", b"<html>")]


def _pack(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


GOOD = _pack(_good_members())


class _Server(http.server.ThreadingHTTPServer):
    """Answers GET with `body` in two halves; waits for `gap` before the second."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body, self.status, self.sent = GOOD, 200, None
        self.gap = threading.Event()
        self.gap.set()
        self.requests = 0
        self.half_sent = threading.Event()

    def handle_error(self, request, client_address):
        """A client that hangs up, or was killed, is part of the tests."""

    def archive(self, **changes):
        """The archive as its publisher describes it; `changes` make the description differ from what is served."""
        description = dict(
            url=f"http://127.0.0.1:{self.server_port}/small.tar.gz",
            num_bytes=len(self.body),
            checksum=("sha256", hashlib.sha256(self.body).hexdigest()),
        )
        return remote.RemoteFile(**{**description, **changes})


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self.server.requests += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        half = len(self.server.body) // 2
        self.wfile.write(self.server.body[:half])
        self.server.half_sent.set()
        self.server.gap.wait(20)
        rest = self.server.body[half : self.server.sent]
        self.wfile.write(rest)

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


def _names(directory):
    return sorted(os.listdir(directory))


def test_the_files_and_nothing_else_are_unpacked_and_kept(server, tmp_path):
    folder = download.download(tmp_path / "new", server.archive())
    assert folder == tmp_path / "new" / "cifar-10-batches-bin"
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert [(folder / name).read_bytes() for name in FILES] == [bytes([i]) * 3073 for i in range(len(FILES))]
    assert download.download(tmp_path / "new", server.archive()) == folder
    assert server.requests == 1 and _names(tmp_path / "new") == ["cifar-10-batches-bin"]


def _serve(**attributes):
    def prepare(server):
        archive = server.archive()
        for name, value in attributes.items():
            setattr(server, name, value)
        return archive

    return prepare


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (_serve(status=404), "404 Client Error: Not Found"),
        (_serve(sent=-100), f"{len(GOOD) - 100} bytes read, 100 more expected"),
        (_serve(body=GOOD[:-1] + b"?"), "got a file whose sha256 is .*, not "),
        (lambda s: s.archive(checksum=("md5", "0" * 32)), "got a file whose md5 is .*, not 000"),
        (_serve(gap=threading.Event()), "timed out"),
        (lambda s: s.archive(url="http://127.0.0.1:1/x.tar.gz"), "Connection refused"),
    ],
    ids=["status", "cut off", "damaged", "other", "stalled", "refused"],
)
def test_a_failure_is_one_line_within_seconds_and_leaves_nothing(server, tmp_path, prepare, reason):
    archive, secs = prepare(server), 0.5 if reason == "timed out" else 4.0
    started = time.monotonic()
    with pytest.raises(errors.DataError) as raised:
        download.download(tmp_path, archive, timeout_secs=secs)
    assert time.monotonic() - started < 5
    text = str(raised.value)
    assert "\n" not in text and f"from {archive.url}: " in text
    assert re.search(reason, text), text
    assert f"put its files (data_batch_1.bin to test_batch.bin) into {tmp_path}/{download.FOLDER}." in text
    assert _names(tmp_path) == []


def test_an_answer_without_end_is_not_read_to_its_end(server, tmp_path):
    archive = server.archive()
    server.body = GOOD + bytes(16 * 2**20)
    with pytest.raises(errors.DataError) as raised:
        download.download(tmp_path, archive)
    received = int(re.search(f"got ([0-9]+) bytes instead of {len(GOOD)}", str(raised.value))[1])
    assert len(GOOD) < received < 2**20 and _names(tmp_path) == []


def test_files_that_are_in_the_way_are_left_alone(server, tmp_path):
    (tmp_path / download.FOLDER).mkdir()
    (tmp_path / download.FOLDER / "mine").write_text("precious")
    with pytest.raises(errors.DataError, match="is in the way"):
        download.download(tmp_path, server.archive())
    assert (tmp_path / download.FOLDER / "mine").read_text() == "precious" and server.requests == 0
