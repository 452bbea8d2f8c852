"""Whatever bytes a file holds, a reader gives what its format says, or one of our own errors that names the file."""

import gzip

import hypothesis
import pytest
from hypothesis import strategies

from cifar10 import records
from tower_train import errors
from tower_train.data import idx

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


IDX = strategies.binary(max_size=60) | changed(VALID_IDX) | changed(gzip.compress(VALID_IDX))
READERS = {  # {name: (contents of a file, reads it and returns whether the result is as the format says)}
    "idx": (IDX, lambda path: idx.read(path).ndim > 0),
    "records": (
        changed(bytes(2 * records.RECORD_BYTES)),
        lambda path: len(records.read([path]).labels) * records.RECORD_BYTES == path.stat().st_size,
    ),
}


@pytest.mark.parametrize(("contents", "is_right"), READERS.values(), ids=READERS)
def test_any_bytes_are_a_file_of_the_format_or_a_data_error_that_names_it(contents, is_right, tmp_path):
    path = tmp_path / "file"

    @hypothesis.given(contents)
    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    def read(content):
        path.write_bytes(content)
        try:
            assert is_right(path)
        except errors.DataError as error:
            assert str(error).startswith(f"{path}: ")

    read()
