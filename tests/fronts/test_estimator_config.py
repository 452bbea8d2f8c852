"""RunConfig and TF_CONFIG, for one process: what the front adds to the library's."""

import copy
import importlib
import json

import numpy as np
import pytest
import tensorflow as tf
from regression import expected_weights, input_fn, make, weights_of
from tensorflow.python.distribute.distribute_config import DistributeConfig

from tower_train import errors
from tower_train import estimator as tf_estimator
from tower_train.fronts import tf_estimator as tf_estimator_front

RunConfig = tf_estimator.RunConfig
CLUSTER = {"chief": ["c:0"], "ps": ["p:1", "p:2"], "worker": ["w:3", "w:4", "w:5"]}


def set_task(monkeypatch, cluster, kind="worker", index=0):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}))


def test_a_changed_copy_keeps_towers_and_what_is_the_users():
    config = RunConfig("a", num_gpus=2)
    config.mine = 1
    changed = copy.deepcopy(config).replace(save_checkpoints_secs=30, num_gpus=3)
    assert (changed.mine, changed.model_dir, changed.num_gpus, config.num_gpus) == (1, "a", 3, 2)


def test_strategies_of_experimental_distribute_are_those_of_the_config():
    strategies = {"train_distribute": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), "eval_distribute": None}
    config = RunConfig(experimental_distribute=DistributeConfig(**strategies))
    assert (config.towers, config.eval_distribute) == (2, None)
    for twice in ({"experimental_distribute": DistributeConfig(**strategies), "num_gpus": 2}, strategies):
        with pytest.raises(errors.ConfigError, match="train_distribute"):
            assert RunConfig(**{"experimental_distribute": DistributeConfig(**strategies)} | twice).towers
    with pytest.raises(errors.ConfigError, match="remote_cluster. .* start it on each worker"):
        RunConfig(experimental_distribute=DistributeConfig(remote_cluster=CLUSTER))


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "expected"),
    [  # expected: is_chief, num_worker_replicas, num_ps_replicas, global_id_in_cluster, master
        (CLUSTER, "ps", 1, (False, 4, 2, 5, "grpc://p:2")),
        (CLUSTER, "evaluator", 7, (False, 0, 0, None, "")),
        ({"worker": ["w:3", "w:4"]}, "worker", 0, (True, 2, 0, 0, "grpc://w:3")),
        # As Kubeflow writes it.
        ({"chief": ["c:0"], "worker": ["w:3"], "ps": [], "evaluator": ["e:1"]}, "worker", 0, (False, 2, 0, 2, None)),
    ],
)
def test_properties_tell_the_task_in_a_cluster(monkeypatch, cluster, kind, index, expected):
    set_task(monkeypatch, cluster, kind, index)
    config = RunConfig()
    ids = config.num_worker_replicas, config.num_ps_replicas, config.global_id_in_cluster
    assert (config.is_chief, *ids) == expected[:4]
    assert expected[4] in (config.master, None) and (config.task_type, config.task_id) == (kind, index)
    there = {job: hosts for job, hosts in cluster.items() if hosts}
    assert config.cluster_spec.as_dict() == ({} if kind == "evaluator" else there)


def test_a_cluster_of_one_trains(tmp_path, monkeypatch):
    set_task(monkeypatch, {"master": ["host:2222"]}, "master")
    config = RunConfig()
    assert (config.is_chief, config.task_type, config.master) == (True, "master", "")
    estimator = make(tmp_path, 2).train(input_fn)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(6, 2), atol=1e-12)


def test_parameter_servers_are_refused(tmp_path, monkeypatch):
    set_task(monkeypatch, {"master": ["a:1"], "ps": ["b:1", "c:1"]}, "master")
    with pytest.raises(errors.ConfigError, match="TF_CONFIG has the job 'ps', for which there is no use here.*$"):
        make(tmp_path).train(input_fn)
    assert not list(tmp_path.iterdir())


def test_workers_evaluate_by_themselves(tmp_path, monkeypatch):
    expected = make(tmp_path).train(input_fn, max_steps=3).evaluate(input_fn)
    set_task(monkeypatch, {"worker": ["a:1", "b:1"]}, "worker", 1)
    assert make(tmp_path).evaluate(input_fn) == expected


@pytest.mark.parametrize("package", ["tensorflow_estimator", "tf_keras"])
def test_without_the_librarys_packages_an_import_is_one_line_that_names_the_extra(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    with pytest.raises(ImportError, match=rf"needs the package {package}: pip install 'tower_train\[estimator\]'"):
        importlib.reload(tf_estimator_front)
