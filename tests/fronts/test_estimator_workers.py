"""Estimators in the tasks of TF_CONFIG, which are processes of their own."""

import contextlib
import json
import signal

import clusters
import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import BATCH, X, Y, expected_weights
from regression_program import TABLE_ROWS

PROGRAM = jobs.TESTS / "fronts" / "regression_program.py"


@contextlib.contextmanager
def tasks(folders):
    """Starts a program for each task, {type: its MODEL_DIR}; yields them, and the hosts."""
    hosts = dict(zip(("chief", "worker"), clusters.hosts(2), strict=True))
    cluster = {name: [host] for name, host in hosts.items()}
    with contextlib.ExitStack() as stack:
        started = {}
        for kind, folder in folders.items():
            config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
            started[kind] = stack.enter_context(jobs.Program(str(PROGRAM), str(folder), TF_CONFIG=config))
        yield started, hosts


def printed(program):
    """Returns the values that a task prints once it has them."""
    program.wait_until(lambda: any(line.startswith("[{") for line in program.output().splitlines()))
    return json.loads(next(line for line in program.output().splitlines() if line.startswith("[{")))


def assert_line(found, values):
    np.testing.assert_allclose(np.append(found["weights"], found["bias"]), values, rtol=1e-9, atol=1e-12)


def trained_table():
    """As many steps as both workers have batches, which are of any number of rows."""
    table = np.ones([4, 2])
    for rows in zip(*TABLE_ROWS, strict=False):
        gradient, touched = np.zeros_like(table), np.concatenate(rows)
        np.add.at(gradient, touched, 2 * table[touched])
        table -= 0.125 * gradient / len(touched)
    return table


def moving_averages():
    """After two steps on the batches of four towers, as of one device, with its dropout."""
    mean, variance = np.zeros(3), np.ones(3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.random.set_seed(1)
        dropped = tf.nn.dropout(tf.ones([4, BATCH, 3], tf.float64), 0.5, seed=7)
        masks = [session.run(dropped)[[0, 2, 1, 3]] for _ in range(2)]  # the workers take batches in turn
    for batches in X[: 8 * BATCH].reshape(2, 4, BATCH, 3) * masks:
        mean, variance = (mean + batches.mean((0, 1))) / 2, (variance + batches.var((0, 1))) / 2
    return mean, variance


def test_workers_train_as_one_machine_go_on_and_name_one_that_dies_while_an_evaluator_watches(tmp_path):
    """Two with two towers each are four towers on their joined batches; the second one has another model_dir."""
    line = tmp_path / "model/line"
    folders = {"evaluator": tmp_path / "model", "chief": tmp_path / "model", "worker": tmp_path / "other"}
    with tasks(folders) as (started, hosts):
        found = [printed(started[kind]) for kind in ("chief", "worker")]
        started["chief"].wait_until(lambda: "hangs" in started["worker"].output())
        assert "Nothing to train: max_steps=9 are done" in started["worker"].output()
        equal = "equal 1 on this network to "  # each worker compares, the chief says so
        assert [started[kind].output().count(equal) for kind in ("chief", "worker")] == [1, 0]
        started["worker"].process.send_signal(signal.SIGKILL)
        assert started["chief"].process.wait(jobs.WAIT_SECS) == 138, started["chief"].output()
        [last] = [line for line in started["chief"].output().splitlines() if "tower_train: error: " in line]
        assert f"tower_train: error: worker 1 ({hosts['worker']}) is missing" in last
        assert "Start the program again on every machine" in last
        assert started["evaluator"].process.wait(jobs.WAIT_SECS) == 0, started["evaluator"].output()

    batches = [*range(0, 4), *range(0, 5)]  # each training begins the input anew
    values = expected_weights(9, 4, first_row=lambda step: batches[step] * 4 * BATCH)
    for trained, table, stopped in found:
        assert trained["global_step"] == 9
        assert_line(trained, values)
        assert table["global_step"] == 3
        np.testing.assert_allclose(table["table"], trained_table(), rtol=1e-9)
        assert stopped["global_step"] == 2
        assert_line(stopped, expected_weights(2, 4, start=values))
        averages = stopped["norm/moving_mean"], stopped["norm/moving_variance"]
        np.testing.assert_allclose(averages, moving_averages(), rtol=1e-9)
    assert len({stopped[f"gamma {i}"] for _, _, stopped in found for i in range(2)}) == 4  # each tower draws its own
    errors_of = X @ values[:3] + values[3] - Y
    evaluated = jobs.events(line / "eval").Scalars("mae")[-1]
    assert evaluated.step == 9 and evaluated.value == pytest.approx(np.abs(errors_of).mean(), rel=1e-6)
    assert jobs.saved_steps(line)[-3:] == [6, 8, 9] and not (tmp_path / "other").exists()
