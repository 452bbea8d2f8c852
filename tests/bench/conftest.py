"""Fake processes of sides, which only give answers."""

import pytest
import sides


@pytest.fixture
def fake_workers():
    return sides.FakeWorkers
