"""The machine as Linux's files tell of it; elsewhere little is known."""

import pytest

from tower_train import host


@pytest.mark.parametrize(
    ("text", "expected"),
    [("MemTotal:  9 kB\nMemAvailable:    3 kB\nBuffers: 5 kB\n", 3 * 1024), ("MemTotal: 9 kB\n", None), (None, None)],
)
def test_free_memory_is_what_linux_says_is_available(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    if text is not None:
        host.MEMINFO.write_text(text)
    assert host.free_memory() == expected
