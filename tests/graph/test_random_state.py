"""Operations with a random state of their own, where they are allowed; test_mistakes.py has those that are refused."""

import re

import jobs
import pytest
import tensorflow as tf
import toy_workload

import tower_train
from tower_train import errors


def toy(change):
    """The toy workload with change(hidden) between its two layers."""

    def network(features, training):
        hidden = change(toy_workload.layer("hidden", features, 8))
        return toy_workload.layer("softmax_linear", hidden, 3)

    return tower_train.Workload("changed", toy_workload.load, network)


def test_the_option_trains_all_the_same_and_log_and_run_json_tell(tmp_path, capsys):
    workload = toy(lambda x: tf.nn.dropout(x, 0.5))
    jobs.train_toy(tmp_path, workload=workload, max_steps=1, allow_stateful_random=True)
    output, run = capsys.readouterr().out, jobs.read_json(tmp_path, "run.json")
    [line] = re.findall(r"^\*\*\* --allow_stateful_random: several towers .*$", output, re.MULTILINE)
    assert re.search(r"dropout/\S+ \(RandomUniform, test_random_state.py:\d+\)\.$", line)
    assert run["config"]["allow_stateful_random"] is True
    assert run["random_numbers"]["by_example"] == []
    assert "RandomUniform" in run["random_numbers"]["stateful"][0]
    with pytest.raises(errors.GraphError, match="Use tower_train.layers.dropout"):
        jobs.train_toy(tmp_path, workload=workload, max_steps=2)


def test_a_run_that_drew_otherwise_is_refused_unless_overridden(tmp_path):
    jobs.train_toy(tmp_path, workload=toy(lambda x: x), max_steps=1)
    workload = toy(lambda x: tower_train.layers.dropout(x, 0.5, True))
    with pytest.raises(errors.RunError, match="another run: what draws by example was nothing, now dropout. Give"):
        jobs.train_toy(tmp_path, workload=workload, max_steps=2)
    assert jobs.train_toy(tmp_path, workload=workload, max_steps=2, override=True).step == 2
