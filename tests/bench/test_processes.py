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


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("broken", "its process ended with status 1. Its last words: ", "RuntimeError: out of ideas"),
        ("refused", "its process ended with status ", ""),
        ("fatal", f"its process ended with status -{signal.SIGABRT.value}.", ""),
        ("stuck", "its process hangs: no answer within 1 seconds. ", "this takes for ever"),
    ],
)
def test_a_side_that_fails_is_one_line_with_its_last_words_and_leaves_no_process(name, begins, ends, outcomes):
    worker, error = outcomes[name]
    message = str(error)
    assert message.startswith(f"{name}: {begins}") and message.endswith(ends) and "\n" not in message
    assert ("ConfigError: --workload=broken:NOTHING" in message) == (name == "refused")
    assert isinstance(error, errors.UserError) and error.exit_status == 1
    with pytest.raises(ProcessLookupError):
        os.kill(worker._process.pid, 0)
