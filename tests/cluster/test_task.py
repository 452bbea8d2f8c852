"""How a process finds its task among several."""

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


def test_without_a_word_a_process_is_by_itself():
    assert found() is None
    assert found(worker_hosts="a:1", task_index=0) is None


def test_the_command_line_is_taken_first(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 2}})
    )
    assert found(worker_hosts="x:1,y:2", task_index=1) == (["x:1", "y:2"], 1)
    assert found() == (WORKERS, 2)


@pytest.mark.parametrize(("task", "index", "place"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_tf_configs_chief_comes_before_its_workers(task, index, place, monkeypatch):
    jobs = {"worker": WORKERS[1:], "chief": WORKERS[:1]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": task, "index": index}}))
    assert found() == (WORKERS, place)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be understood"),
        ('{"cluster": 5}', "cannot be understood"),
        (json.dumps({"cluster": {"worker": WORKERS, "ps": ["d:4"]}, "task": {"type": "worker", "index": 0}}), "job ps"),
        (json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 3}}), "worker 3, which"),
        (json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "evaluator", "index": 0}}), "evaluator 0, which"),
    ],
)
def test_a_tf_config_that_cannot_be_is_refused(text, reason, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(errors.ConfigError, match=f"TF_CONFIG.*{reason}"):
        found()


def set_slurm(monkeypatch, nodes, task, tasks=4, here=None):
    values = dict(PROCID=task, STEP_NUM_TASKS=tasks, STEP_NODELIST=nodes, STEP_TASKS_PER_NODE="2(x2)")
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    if here:
        monkeypatch.setenv("SLURMD_NODENAME", here)


def test_slurms_tasks_are_workers(monkeypatch):
    set_slurm(monkeypatch, "n[1-2]", 3, here="n2")
    assert found() == (["n1:8888", "n1:8889", "n2:8888", "n2:8889"], 3)


def test_slurm_nodes_in_another_order_are_refused(monkeypatch):
    set_slurm(monkeypatch, "n[9-10]", 0, here="n9")
    with pytest.raises(errors.ConfigError, match="Slurm runs task 0 on n9, but .* n10:8888.*--worker_hosts"):
        found()
