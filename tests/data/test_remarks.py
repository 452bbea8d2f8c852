"""Standard error while images are decoded: what libraries remark there is kept, what others log is passed on."""

import os

import pytest

from tower_train import console
from tower_train.data import remarks

LOGGED = b"2026-01-01 00:00:00.123456: W tensorflow/core/other.cc:1] of something else\n"
NOTICED = b"tower_train: a notice\n"


def test_remarks_are_kept_and_log_lines_are_passed_on(capfd):
    with remarks.of_decoders() as take:
        os.write(2, b"Corrupt JPEG data: bad Huffman code\nUnsupported marker type 0x73\n" + LOGGED)
        assert take() == "Corrupt JPEG data: bad Huffman code" and take() == ""
        os.write(2, NOTICED + b"E0000 00:00:1795320802.880178   16561 jpeg_mem.cc:331] Premature end of JPEG data.\n")
        assert take() == "Premature end of JPEG data."
        os.write(2, b"not asked for\n")
    assert capfd.readouterr() == ("", (LOGGED + NOTICED).decode())


def test_standard_error_is_given_back_with_all_that_was_said_before_a_failure(capfd):
    with pytest.raises(ValueError), console.stderr_in_file():
        os.write(2, b"the reason\n")
        raise ValueError
    os.write(2, b"later\n")
    assert capfd.readouterr() == ("", "the reason\nlater\n")
