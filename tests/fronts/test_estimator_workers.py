"""Estimators in the tasks of TF_CONFIG, which are processes of their own."""

import contextlib
import json
import signal

import clusters
import jobs
import numpy as np
import pytest
from regression import BATCH, X, Y, expected_weights
from regression_program import OTHER_TYPES, TABLE_ROWS

FRONTS = jobs.TESTS / "fronts"


@contextlib.contextmanager
def tasks(folders, *words, types=("chief", "worker", "evaluator")):
    """Starts a program for each task with its MODEL_DIR; yields them, and the hosts."""
    hosts = dict(zip(("chief", "worker"), clusters.hosts(2), strict=True))
    cluster = {name: [host] for name, host in hosts.items()}
    path = jobs.environment(jobs.TESTS, FRONTS)["PYTHONPATH"]
    with contextlib.ExitStack() as stack:
        started = {}
        for kind in types:
            config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
            program = jobs.Program("regression_program", folders[kind], *words, TF_CONFIG=config, PYTHONPATH=path)
            started[kind] = stack.enter_context(program)
        yield started, hosts


def ends(started):
    """The exit statuses; what each task printed last, where it ended well."""
    statuses = [program.process.wait(jobs.WAIT_SECS) for program in started.values()]
    assert not any(statuses), [program.output() for program in started.values()]
    return {kind: json.loads(program.output().splitlines()[-1]) for kind, program in started.items()}


def assert_line(found, values):
    weights = np.append(found["line"]["weights"], found["line"]["bias"])
    np.testing.assert_allclose(weights, values, rtol=1e-9, atol=1e-12)


def test_workers_train_as_one_machine_and_an_evaluator_watches(tmp_path):
    """Two with two towers each are four towers on their joined batches; the second one has another model_dir."""
    line, other = str(tmp_path / "model"), str(tmp_path / "other")
    with tasks({"chief": line, "worker": other, "evaluator": line}, "6") as (started, _):
        found = ends(started)
    values = expected_weights(6, 4)
    for kind in ("chief", "worker"):
        assert_line(found[kind], values)
        assert found[kind]["line"]["global_step"] == 6
        assert found[kind]["evaluated"] is None
    errors_of = X @ values[:3] + values[3] - Y
    evaluated = found["evaluator"]["evaluated"]
    assert evaluated["global_step"] == 6 and evaluated["mae"] == pytest.approx(np.abs(errors_of).mean(), rel=1e-6)
    assert jobs.saved_steps(f"{line}/line") == [0, 2, 4, 6]
    assert not (tmp_path / "other").exists()
    assert jobs.events(f"{line}/line/eval").Scalars("loss")[-1].step == 6

    table = np.ones([4, 2])  # as many steps as both have batches; of any number of rows
    for rows in zip(*TABLE_ROWS, strict=False):
        gradient = np.zeros_like(table)
        np.add.at(gradient, np.concatenate(rows), 2 * table[np.concatenate(rows)])
        table -= 0.125 * gradient / 2
    for kind in ("chief", "worker"):
        np.testing.assert_allclose(found[kind]["table"]["table"], table, rtol=1e-9)
        assert found[kind]["table"]["global_step"] == 3
        assert [found[kind]["table"][dtype.name] for dtype in OTHER_TYPES] == [[1]] * len(OTHER_TYPES)


def test_a_worker_that_dies_is_named_and_a_restart_goes_on_from_the_chiefs_checkpoint(tmp_path):
    """In the end a hook of the worker ends both after the same step."""
    folders = {"chief": str(tmp_path / "model"), "worker": str(tmp_path / "other")}
    with tasks(folders, "100", "hangs", "5", types=("chief", "worker")) as (started, hosts):
        started["chief"].wait_until(lambda: jobs.saved_step(tmp_path / "model/line") == 4)
        started["worker"].process.send_signal(signal.SIGKILL)
        assert started["chief"].process.wait(jobs.WAIT_SECS) == 138, started["chief"].output()
        last = started["chief"].output().splitlines()[-1]
        assert f"tower_train: error: worker 1 ({hosts['worker']}) is missing" in last
        assert "Start the same program on all machines again" in last
    with tasks(folders, "100", "stops", "5", types=("chief", "worker")) as (started, _):
        found = ends(started)
    batches = [*range(0, 4), *range(0, 5)]  # each start begins the input anew
    values = expected_weights(9, 4, first_row=lambda step: batches[step] * 4 * BATCH)
    for kind in found:
        assert found[kind]["line"]["global_step"] == 9
        assert_line(found[kind], values)
