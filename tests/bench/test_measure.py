"""Sides take turns, each measured once a round; one that dies or hangs is a clear line and leaves no process."""

import contextlib
import json
import os
import signal
import types

import jobs
import pytest
import sides

from tower_train import benchmark, errors
from tower_train.bench import measure
from tower_train.bench.sides import BenchmarkOptions, Side


def measured(log, live, failing=None, together=False):
    """Measures sides a, b and c in six rounds. Their workers note it, and at the first how many there are."""

    @contextlib.contextmanager
    def start(side):
        def measure(seconds):
            log.append(side.name)
            if side.name == failing:
                raise RuntimeError("died")
            return 160.0

        first, last = {"first_step_secs": 3.0}, {"peak_bytes": 1001, "card_bytes": 0}
        live.add(side.name)
        answer = lambda: counts.append(len(live)) or first  # noqa: E731
        yield types.SimpleNamespace(answer=answer, measure=measure, stop=lambda: last)
        live.remove(side.name)

    counts = []
    return measure.in_rounds([Side(name, "module:train") for name in "abc"], start, 6, 0.5, together), counts


def test_every_side_is_measured_once_a_round_in_an_order_that_changes():
    results, counts = measured(log := [], live := set())
    assert counts == [1, 2, 3], "they start one after the other"
    assert measured([], set(), together=True)[1] == [3, 3, 3], "--start_together"
    orders = [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert len(orders) == 6 and not live
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) > 2
    assert [result.rates for result in results] == [dict.fromkeys(range(6), 160.0)] * 3
    assert {result.peak_bytes for result in results} == {1001}
    with pytest.raises(RuntimeError):
        measured(log, live, failing="b")


SCRIPTS = {  # what stands for Python in some of the processes
    "stuck": "#!/bin/sh\necho this takes for ever >&2\nexec sleep 1000\n",
    "fatal": "#!/bin/sh\nkill -ABRT $$\n",
}


def start(name, place, timeout_secs=100, train="nowhere:train", **arguments):
    options = BenchmarkOptions(device="cpu", batch_size=8, timeout_secs=timeout_secs)
    return measure.Worker(Side(name, train, arguments), options, place / name)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{name: (the worker, its error)} of workers that all go wrong."""
    place, found = tmp_path_factory.mktemp("workers"), {}
    with pytest.MonkeyPatch.context() as patch:
        nowhere = dict(workload="nowhere:MINE", model=None, device="cpu", towers=1, dtype="float32")
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
        ("broken", "its process ended with status 1. Its last words: ", "Error: No module named 'nowhere'"),
        ("refused", "its process ended with status ", ""),
        ("fatal", f"its process ended with status -{signal.SIGABRT.value}.", ""),
        ("stuck", "its process hangs: no answer within 1 seconds. ", "this takes for ever"),
    ],
)
def test_a_side_that_fails_is_one_line_with_its_last_words_and_leaves_no_process(name, begins, ends, outcomes):
    worker, error = outcomes[name]
    message = str(error)
    assert message.startswith(f"{name}: {begins}") and message.endswith(ends) and "\n" not in message
    assert ("ConfigError: --workload=nowhere:MINE" in message) == (name == "refused")
    assert isinstance(error, errors.UserError) and error.exit_status == 1
    with pytest.raises(ProcessLookupError):
        os.kill(worker._process.pid, 0)


SIDES = ["port", "tower_train/2 towers/float32"]


def test_a_comparison_of_real_processes(cifar10_dir, tmp_path, capsys):
    words = jobs.flags(systems=",".join(SIDES), rounds=2, seconds=0.1, batch_size=8, towers="1,2", device="cpu")
    words += jobs.flags(dataset="cifar10", data_dir=cifar10_dir, out=tmp_path)
    with sides.forking():
        status = benchmark.main(["benchmark", *words])
    assert status == 0 and "tower_train, 2 towers" in capsys.readouterr().out
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {row["side"]["name"]: row for row in written["parts"]["Training"]}
    assert list(rows) == SIDES
    for row in rows.values():
        assert 0.05 < row["first_step_secs"] < 300 and row["peak_bytes"] > 100 * 2**20
        assert list(row["rates"]) == ["0", "1"] and row["rate"]["low"] == min(row["rates"].values()) > 0
    assert set(rows["port"]["ratio"].values()) == {1.0}


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigError, match="--out=.*/file/out cannot be made"):
        benchmark.main(["benchmark", f"--out={tmp_path / 'file' / 'out'}"])
