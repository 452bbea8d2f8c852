"""A folder appears whole or not at all."""

import concurrent.futures
import threading

import jobs
import pytest

from tower_train.data import publish


def _is_complete(folder):
    return (folder / "done").exists()


def _fill(folder):
    (folder / "first").write_text("1")
    (folder / "done").write_text("2")


def _names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_folder_and_its_parents_are_made_once_and_an_incomplete_one_is_replaced(tmp_path):
    folder, calls = tmp_path / "a" / "b" / "data", []

    def fill(partial):
        calls.append(partial.parent)
        _fill(partial)

    for _ in range(2):
        publish.publish_folder(folder, fill, _is_complete)
        assert _names(folder.parent) == ["data"] and _names(folder) == ["done", "first"]
        assert calls == [folder.parent], "a rename is atomic within one file system only"
    (folder / "done").rename(folder / "stale")
    publish.publish_folder(folder, fill, _is_complete)
    assert _names(folder) == ["done", "first"] and len(calls) == 2
    folder.rename(folder.with_name(".data.old"))  # a process died while it put another in its place

    def fail(partial):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish.publish_folder(folder, fail, lambda _: False)
    assert _names(folder.parent) == ["data"] and _names(folder) == ["done", "first"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_remains_of_a_failure(tmp_path, error):
    def fail_halfway(partial):
        (partial / "first").write_text("1")
        raise error

    (tmp_path / "mine").mkdir()
    for folder in ("made/too/data", "mine/data"):
        with pytest.raises(type(error)):
            publish.publish_folder(tmp_path / folder, fail_halfway, _is_complete)
        assert _names(tmp_path) == ["mine"] and _names(tmp_path / "mine") == []


def test_who_wants_the_same_folder_waits_and_what_a_killed_process_left_is_replaced(tmp_path, capsys):
    """Threads, between which locks hold as between processes."""
    began, go, made, told = threading.Event(), threading.Event(), [], []

    def fill(partial):
        made.append(_names(partial))
        began.set()
        assert go.wait(jobs.WAIT_SECS)
        _fill(partial)

    (tmp_path / ".data.partial").mkdir()
    (tmp_path / ".data.partial" / "first").write_text("half")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        work = publish.publish_folder, tmp_path / "data", fill, _is_complete
        first = pool.submit(*work)
        assert began.wait(jobs.WAIT_SECS)
        second = pool.submit(*work)
        jobs.wait_for(lambda: told.append(capsys.readouterr().err) or told[-1])
        go.set()
        assert first.result() is second.result() is None
    assert "".join(told) == f"tower_train: Another process is making {tmp_path / 'data'}; waiting for it.\n"
    assert made == [[]] and _names(tmp_path) == ["data"] and _names(tmp_path / "data") == ["done", "first"]
