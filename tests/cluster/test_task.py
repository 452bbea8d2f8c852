"""A process finds its task among several."""

import json

import pytest

from tower_train import errors
from tower_train.cluster.task import find_task

WORKERS = ["a:1", "b:2", "c:3"]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def found(worker_hosts=None, task_index=None):
    task = find_task(worker_hosts, task_index)
    assert task.is_chief == (task.index == 0)
    return None if task.is_alone else (list(task.hosts), task.index)


def tf_config(kind, index, **jobs):
    return json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})


def test_the_command_line_comes_before_tf_config_and_without_a_word_a_process_is_by_itself(monkeypatch):
    assert found() is None and found(worker_hosts="a:1", task_index=0) is None
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 2, worker=WORKERS))
    assert found(worker_hosts="x:1,y:2", task_index=1) == (["x:1", "y:2"], 1)
    assert found() == (WORKERS, 2)


def test_tf_configs_chief_comes_before_its_workers_and_empty_jobs_and_an_evaluator_are_left_out(monkeypatch):
    others = dict(ps=[], evaluator=["z:9"], worker=WORKERS[1:], chief=WORKERS[:1])
    for task, index, place in (("chief", 0, 0), ("worker", "0", 1), ("worker", 1, 2)):
        monkeypatch.setenv("TF_CONFIG", tf_config(task, index, **others))
        assert found() == (WORKERS, place)


def test_a_tf_config_that_cannot_be_is_refused(monkeypatch):
    for text, reason in (
        ("{", "cannot be understood"),
        ("[" * 5000, "cannot be understood"),
        (json.dumps({"cluster": {"worker": WORKERS}}), "cannot be understood"),
        (tf_config(["worker"], 0, worker=WORKERS), "type is no text"),
        (tf_config("worker", 0, worker=["a:1", 5]), "no list of texts"),
        (tf_config("worker", float("inf"), worker=["a:1"]), "index is 'inf', not a"),
        (tf_config("worker", 0, worker=["a:99999"]), "'a:99999' is not"),
        (tf_config("worker", 0, worker=["a:1", "a:1"]), "twice"),
        (tf_config("worker", 0, worker=WORKERS, ps=["d:4"]), "job 'ps'"),
        (tf_config("worker", 3, worker=WORKERS), "'worker' 3, but"),
        (tf_config("evaluator", 0, worker=WORKERS), "this is 'evaluator' 0, but only the chief"),
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(errors.ConfigError, match=f"TF_CONFIG.*{reason}"):
            found()


def set_slurm(monkeypatch, **changes):
    """Four tasks on two nodes; None for a variable that is not set."""
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    values = dict(PROCID=0, STEP_NUM_TASKS=4, STEP_NODELIST="n[1-2]", STEP_TASKS_PER_NODE="2(x2)") | changes
    for name, value in values.items():
        if value is not None:
            monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_slurms_tasks_are_workers_node_after_node(monkeypatch):
    for nodes, tasks_per_node, index, hosts in (
        ("n[1-2]", "2(x2)", 3, ["n1:8888", "n1:8889", "n2:8888", "n2:8889"]),
        ("n[9-10]", "2,2", 0, ["n9:8888", "n9:8889", "n10:8888", "n10:8889"]),
        ("a[08,10-11],b-c.d", "1(x4)", 3, ["a08:8888", "a10:8888", "a11:8888", "b-c.d:8888"]),
        ("m,n", "1,3", 1, ["m:8888", "n:8888", "n:8889", "n:8890"]),
    ):
        set_slurm(monkeypatch, PROCID=index, STEP_NODELIST=nodes, STEP_TASKS_PER_NODE=tasks_per_node)
        assert found() == (hosts, index)


def test_slurm_variables_that_cannot_be_are_one_line(monkeypatch):
    for changes, reason in (
        (dict(STEP_NUM_TASKS="x"), "SLURM_STEP_NUM_TASKS is 'x'"),
        (dict(STEP_NUM_TASKS="5"), "5 tasks"),
        (dict(PROCID=None), "SLURM_PROCID is not set"),
        (dict(PROCID="4"), "of which this is number 4"),
        (dict(STEP_NODELIST="n[1-"), r"n\[1-"),
        (dict(STEP_NODELIST="n[2-1]"), "are not"),
        (dict(STEP_NODELIST="n[1-999999999]"), "not as in"),
        (dict(STEP_TASKS_PER_NODE="2,2(x"), "SLURM_STEP_TASKS_PER_NODE"),
    ):
        set_slurm(monkeypatch, **changes)
        with pytest.raises(errors.ConfigError, match=f"cannot be understood: .*{reason}") as raised:
            found()
        assert "\n" not in str(raised.value)
