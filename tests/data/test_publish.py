"""A folder appears whole or not at all."""

import subprocess
import sys

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


_SCRIPT = """
import pathlib, runpy, sys, time
module, folder, go = sys.argv[1:]

def fill(partial):
    (partial / "first").write_text("1")
    print("filling", flush=True)
    while not pathlib.Path(go).exists():
        time.sleep(0.01)
    (partial / "done").write_text("2")

publish_folder = runpy.run_path(module)["publish_folder"]
publish_folder(pathlib.Path(folder), fill, lambda folder: (folder / "done").exists())
"""


def _start(folder):
    """A process that prints a line when it begins to make the folder, and goes on once a file `go` lies beside it."""
    command = [sys.executable, "-c", _SCRIPT, publish.__file__, str(folder), str(folder.parent / "go")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_want_the_same_folder_take_turns_and_one_that_is_killed_leaves_nothing(tmp_path):
    killed = _start(tmp_path / "data")
    assert killed.stdout.readline() == "filling\n"
    others = [_start(tmp_path / "data") for _ in range(2)]
    line = f"tower_train: Another process is making {tmp_path / 'data'}; waiting for it.\n"
    assert [process.stderr.readline() for process in others] == [line] * 2
    assert _names(tmp_path) == [".data.lock", ".data.partial"]
    killed.kill()
    (tmp_path / "go").touch()
    printed = [process.communicate(timeout=30) for process in others]
    assert sorted(printed) == [("", ""), ("filling\n", "")] and not any(process.returncode for process in others)
    killed.communicate()
    assert _names(tmp_path) == ["data", "go"] and _names(tmp_path / "data") == ["done", "first"]
