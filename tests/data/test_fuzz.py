"""Whatever bytes a file holds, a reader gives what its format says, or one of our own errors that names the file."""

import gzip
import io
import pathlib
import tarfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from cifar10 import download, records
from tower_train import errors
from tower_train.data import idx, remote

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
VALID_IDX = bytes([0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + bytes(12)


def changed(valid):
    """A valid file with some bytes replaced and its end moved."""

    def apply(edits, length):
        data = bytearray(valid)
        for place, value in edits:
            data[place % len(data)] = value
        return bytes(data[:length]) if length <= len(data) else bytes(data) + bytes(length - len(data))

    edits = strategies.lists(strategies.tuples(strategies.integers(0, 2**20), strategies.integers(0, 255)), max_size=4)
    lengths = strategies.just(len(valid)) | strategies.integers(0, len(valid) + 9)
    return strategies.builds(apply, edits, lengths)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file"


@hypothesis.given(content=strategies.binary(max_size=60) | changed(VALID_IDX) | changed(gzip.compress(VALID_IDX)))
@SETTINGS
def test_any_bytes_are_an_idx_file_or_a_data_error(file, content):
    file.write_bytes(content)
    try:
        values = idx.read(file)
    except errors.DataError as error:
        assert str(error).startswith(f"{file}: ")
    else:
        assert isinstance(values, np.ndarray)


@hypothesis.given(content=changed(bytes(2 * records.RECORD_BYTES)))
@SETTINGS
def test_any_bytes_are_records_or_a_data_error(file, content):
    file.write_bytes(content)
    try:
        read = records.read([file])
    except errors.DataError as error:
        assert str(error).startswith(f"{file}: ")
    else:
        assert len(read.labels) * records.RECORD_BYTES == len(content) and read.labels.max() < records.NUM_CLASSES


def archive():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as members:
        for name in (*records.ALL_FILES, records.CLASS_NAMES_FILE, "../outside"):
            member = tarfile.TarInfo(name if name.startswith(".") else f"{download.FOLDER}/{name}")
            member.size = 10
            members.addfile(member, io.BytesIO(bytes(10)))
    return packed.getvalue()


@hypothesis.given(content=changed(archive()) | changed(gzip.decompress(archive())).map(gzip.compress))
@SETTINGS
def test_any_archive_is_unpacked_into_its_folder_or_refused(tmp_path_factory, content):
    top = tmp_path_factory.mktemp("archive")
    folder = top / "folder"
    folder.mkdir()
    (top / "packed").write_bytes(content)
    try:
        download.unpack(top / "packed", folder)
    except remote.FetchError:
        pass
    else:
        assert sorted(path.name for path in folder.iterdir()) == sorted([*records.ALL_FILES, records.CLASS_NAMES_FILE])
    known = {*records.ALL_FILES, records.CLASS_NAMES_FILE}
    assert {path.name for path in folder.iterdir()} <= known
    assert {path.name for path in top.iterdir()} == {"packed", "folder"}
    assert not pathlib.Path(top, "outside").exists()
