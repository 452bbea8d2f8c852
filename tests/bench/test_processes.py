"""A side's process that dies, hangs or refuses to run is one clear line, and none outlives the benchmark."""

import os
import pathlib
import re
import signal
import time

import pytest
import sides

from tower_train import errors
from tower_train.bench import processes, systems

TESTS = pathlib.Path(__file__).parents[1]
BROKEN = """
import dataclasses
import toy_workload

def network(features, training):
    raise RuntimeError("out of ideas")

WORKLOAD = dataclasses.replace(toy_workload.WORKLOAD, inference=network)
"""
SCRIPTS = {  # what stands for Python in some of the processes
    "stuck": "#!/bin/sh\necho this takes for ever >&2\nexec sleep 1000\n",
    "fatal": "#!/bin/sh\nkill -ABRT $$\n",
    "babbling": """#!/bin/sh\necho '{"event": "ready"}'\nexec sleep 1000\n""",
    "slow": """#!/bin/sh\nfor i in 1 2 3; do sleep 0.8; echo '{"event": "warming_up"}'; done\nexec sleep 1000\n""",
}


def start(name, place, timeout_secs=100, workload="toy_workload", data_dir=None, kind="trainer", **more_settings):
    settings = systems.trainer("1 tower", 1, 8).settings | more_settings
    spec = {
        "name": name, "kind": kind, "workload": workload, "model": None, "dataset": "auto", "data_dir": data_dir,
        "device": "cpu", "batch_size": 6, "scratch": str(place / name), "fixed_path": str(place / "fixed"),
    }  # fmt: skip
    return processes.Worker(name, settings | spec, place / name, timeout_secs)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{name: (the worker, its error, seconds until that)} of workers that all go wrong."""
    place, found = tmp_path_factory.mktemp("workers"), {}
    (place / "broken_workload.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), str(place)]))
        with sides.forking():
            workers = [
                start("broken", place, workload="broken_workload"),
                start("missing", place, kind="describe", workload="cifar10", data_dir=str(place / "nowhere")),
            ]
        for name, script in SCRIPTS.items():
            (place / f"{name}.sh").write_text(script)
            (place / f"{name}.sh").chmod(0o700)
            patch.setattr(processes.sys, "executable", str(place / f"{name}.sh"))
            workers.append(start(name, place, timeout_secs={"stuck": 1, "slow": 2}.get(name, 100)))
    begin = time.monotonic()
    for worker in reversed(workers):  # those that take long begin first, and are looked at last
        with worker, pytest.raises(processes.SideError) as error:
            worker.wait_for("first_step")
        found[worker.name] = (worker, error.value, time.monotonic() - begin)
    return found


def test_of_a_side_that_dies_the_last_words_are_repeated(outcomes):
    message = str(outcomes["broken"][1])
    assert message.startswith("broken: its process ended with status 1. Its last words: ")
    assert message.endswith("RuntimeError: out of ideas")


def test_a_side_that_is_killed_is_told_by_its_signal(outcomes):
    assert f"fatal: its process ended with status -{signal.SIGABRT.value}." in str(outcomes["fatal"][1])


def test_a_side_that_hangs_is_given_up(outcomes):
    message = str(outcomes["stuck"][1])
    assert message.startswith("stuck: its process hangs: no 'first_step' within 1 seconds. ")
    assert message.endswith("this takes for ever")


def test_a_side_that_gives_signs_of_life_does_not_hang(outcomes):
    """It is given up two seconds after the last of them, not after its start."""
    _, error, secs = outcomes["slow"]
    assert "its process hangs" in str(error)
    assert secs > 2.4


def test_a_side_that_says_something_else_is_told(outcomes):
    assert """babbling: its process said {"event": "ready"} instead of 'first_step'.""" == str(outcomes["babbling"][1])


def test_what_the_user_can_mend_is_said_as_the_trainer_says_it(outcomes):
    message = str(outcomes["missing"][1])
    assert message.startswith("missing: --data_dir=")
    assert "nowhere: neither it nor" in message


def test_errors_are_one_line_and_end_the_command_with_a_status(outcomes):
    for _, error, _ in outcomes.values():
        assert "\n" not in str(error)
        assert isinstance(error, errors.UserError)
        assert error.exit_status == 1


def children_of(parent):
    """Process numbers, from /proc."""
    stats = [path.read_text() for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    return [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == parent]


def wait_for_the_end_of(process):
    deadline = time.monotonic() + 60
    while pathlib.Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def peak_bytes_of(process):
    """Of this process alone, which may have just begun another."""
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def test_a_side_of_several_processes_is_measured_as_one_and_they_end_together(tmp_path, monkeypatch):
    """The first ends once one of them is killed, and says so; with it end all others."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    with sides.forking(), start("three", tmp_path, num_processes=3) as worker:
        worker.wait_for("first_step")
        ready = worker.wait_for("ready")
        others = children_of(worker.pid)
        assert len(others) == 2
        assert ready["peak_bytes"] > 2.2 * peak_bytes_of(others[0])  # what the first shares counts for less
        assert worker.measure(steps=20)["steps"] >= 20
        os.kill(others[0], signal.SIGKILL)
        with pytest.raises(processes.SideError, match="three: its process ended with status 1. Its last words: "):
            worker.measure(steps=20)
        wait_for_the_end_of(others[1])


def test_no_process_is_left(outcomes):
    for worker, _, _ in outcomes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
