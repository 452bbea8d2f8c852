"""Whatever bytes a file holds, a reader gives what its format says, or one of our own errors that names the file."""

import gzip

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from cifar10 import records
from tower_train import errors
from tower_train.data import idx

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
