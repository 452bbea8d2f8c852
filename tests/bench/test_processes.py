"""A side's process that dies or hangs is one clear line, and none outlives the benchmark."""

import os
import pathlib
import signal

import pytest
import sides

from tower_train import errors
from tower_train.bench import measure
from tower_train.bench.sides import BenchmarkOptions, Side

TESTS = pathlib.Path(__file__).parents[1]
BROKEN = """
def train(request, batch_size, after_step):
    raise RuntimeError("out of ideas")
"""
SCRIPTS = {  # what stands for Python in some of the processes
    "stuck": "#!/bin/sh\necho this takes for ever >&2\nexec sleep 1000\n",
    "fatal": "#!/bin/sh\nkill -ABRT $$\n",
}


def start(name, place, timeout_secs=100, train="broken:train", **arguments):
    options = BenchmarkOptions(device="cpu", batch_size=8, timeout_secs=timeout_secs)
    return measure.Worker(Side(name, train, arguments), options, place / name)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{name: (the worker, its error)} of workers that all go wrong."""
    place, found = tmp_path_factory.mktemp("workers"), {}
    (place / "broken.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), str(place)]))
        nowhere = dict(workload="broken:NOTHING", model=None, device="cpu", towers=1, dtype="float32")
        with sides.forking():
            workers = {
                "broken": start("broken", place),
                "refused": start("refused", place, train="tower_train.bench.trainer:train", **nowhere),
            }
        for name, script in SCRIPTS.items():
            (place / f"{name}.sh").write_text(script)
            (place / f"{name}.sh").chmod(0o700)
            patch.setattr(measure.sys, "executable", str(place / f"{name}.sh"))
            workers[name] = start(name, place, timeout_secs=1 if name == "stuck" else 100)
    for name, worker in workers.items():
        with worker, pytest.raises(measure.SideError) as error:
            worker.answer()
        found[name] = (worker, error.value)
    return found


def test_of_a_side_that_dies_the_last_words_are_repeated(outcomes):
    message = str(outcomes["broken"][1])
    assert message.startswith("broken: its process ended with status 1. Its last words: ")
    assert message.endswith("RuntimeError: out of ideas")


def test_what_the_user_can_mend_is_said_as_the_trainer_says_it(outcomes):
    message = str(outcomes["refused"][1])
    assert "ConfigError: --workload=broken:NOTHING" in message


def test_a_side_that_is_killed_is_told_by_its_signal(outcomes):
    assert f"fatal: its process ended with status -{signal.SIGABRT.value}." in str(outcomes["fatal"][1])


def test_a_side_that_hangs_is_given_up(outcomes):
    message = str(outcomes["stuck"][1])
    assert message.startswith("stuck: its process hangs: no answer within 1 seconds. ")
    assert message.endswith("this takes for ever")


def test_errors_are_one_line_and_end_the_command_with_a_status(outcomes):
    for _, error in outcomes.values():
        assert "\n" not in str(error)
        assert isinstance(error, errors.UserError)
        assert error.exit_status == 1


def test_no_process_is_left(outcomes):
    for worker, _ in outcomes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(worker._process.pid, 0)
