"""RunConfig and TF_CONFIG as TensorFlow 1.15 read them, for one process."""

import copy
import json

import jobs
import numpy as np
import pytest
import tensorflow as tf
from regression import expected_weights, input_fn, make, weights_of

from tower_train import errors
from tower_train import estimator as tf_estimator

v1 = tf.compat.v1
RunConfig = tf_estimator.RunConfig


def set_task(monkeypatch, cluster, kind="worker", index=0, **further):
    text = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}} | further)
    monkeypatch.setenv("TF_CONFIG", text)


def test_a_changed_copy_keeps_towers_and_what_is_the_users():
    config = RunConfig("a", num_gpus=2)
    config.mine = 1
    changed = copy.deepcopy(config).replace(save_checkpoints_secs=30, num_gpus=3)
    assert (changed.mine, changed.model_dir, changed.num_gpus, config.num_gpus) == (1, "a", 3, 2)


@pytest.mark.parametrize("kind", ["worker", "chief", "master"])
def test_a_cluster_of_one_trains(tmp_path, monkeypatch, kind):
    set_task(monkeypatch, {kind: ["host:2222"]}, kind)
    config = RunConfig(num_gpus=2)
    assert (config.is_chief, config.task_type, config.master) == (True, kind, "")
    assert config.cluster_spec.as_dict() == {kind: ["host:2222"]}
    estimator = make(tmp_path, 2).train(input_fn)
    np.testing.assert_allclose(weights_of(estimator), expected_weights(6, 2), atol=1e-12)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [({"master": ["a:1"], "ps": ["b:1", "c:1"]}, "master"), ({"chief": ["a:1"], "ps": ["b:1"]}, "ps")],
)
def test_parameter_servers_are_refused(tmp_path, monkeypatch, cluster, kind):
    set_task(monkeypatch, cluster, kind)
    with pytest.raises(
        errors.ConfigError, match="TF_CONFIG has the job 'ps', for which there is no use here"
    ) as caught:
        make(tmp_path).train(input_fn)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


CLUSTER = {"chief": ["c:0"], "ps": ["p:1", "p:2"], "worker": ["w:3", "w:4", "w:5"]}


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "expected"),
    [  # expected: is_chief, num_worker_replicas, num_ps_replicas, global_id_in_cluster, master
        (CLUSTER, "chief", 0, (True, 4, 2, 0, "grpc://c:0")),
        (CLUSTER, "ps", 1, (False, 4, 2, 5, "grpc://p:2")),
        (CLUSTER, "evaluator", 7, (False, 0, 0, None, "")),
        ({"worker": ["w:3", "w:4"]}, "worker", 0, (True, 2, 0, 0, "grpc://w:3")),
        ({"chief": ["c:0"]}, "chief", 0, (True, 1, 0, 0, "")),
    ],
)
def test_properties_tell_the_task_in_a_cluster(monkeypatch, cluster, kind, index, expected):
    set_task(monkeypatch, cluster, kind, index)
    config = RunConfig()
    ids = config.num_worker_replicas, config.num_ps_replicas, config.global_id_in_cluster
    assert (config.is_chief, *ids, config.master) == expected
    assert (config.task_type, config.task_id, config.evaluation_master) == (kind, index, "")
    assert config.cluster_spec.as_dict() == ({} if kind == "evaluator" else cluster)


def test_an_evaluator_ends_once_it_has_evaluated_the_last_step(tmp_path, monkeypatch):
    exported = []

    class Exported(tf_estimator.Exporter):
        name = "mine"

        def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
            exported.append((checkpoint_path, eval_result["global_step"], is_the_final_export))

    make(tmp_path).train(input_fn, max_steps=3)
    spec = tf_estimator.EvalSpec(input_fn, name="test", start_delay_secs=0, throttle_secs=1, exporters=Exported())
    set_task(monkeypatch, CLUSTER, "evaluator")
    tf_estimator.train_and_evaluate(make(tmp_path), tf_estimator.TrainSpec(input_fn, 3), spec)
    assert exported == [(f"{tmp_path}/model.ckpt-3", 3, True)]
    assert jobs.events(tmp_path / "eval_test").Scalars("loss")[0].step == 3


def test_a_worker_evaluates_by_itself_what_the_chief_saved(tmp_path, monkeypatch):
    expected = make(tmp_path).train(input_fn, max_steps=3).evaluate(input_fn)
    set_task(monkeypatch, {"worker": ["a:1", "b:1"]}, "worker", 1)
    assert make(tmp_path).evaluate(input_fn) == expected


def test_jobs_without_tasks_and_an_evaluator_may_be_in_the_cluster(monkeypatch):
    cluster = {"chief": ["c:0"], "worker": ["w:3"], "ps": [], "evaluator": ["e:1"]}  # as Kubeflow writes it
    for kind, expected in (("chief", (True, 2, 0)), ("worker", (False, 2, 0)), ("evaluator", (False, 0, 0))):
        set_task(monkeypatch, cluster, kind)
        config = RunConfig()
        assert (config.is_chief, config.num_worker_replicas, config.num_ps_replicas) == expected


def test_device_fn_places_the_ops_of_one_tower(tmp_path):
    placed = []

    class Placed(tf_estimator.SessionRunHook):
        def begin(self):
            placed.append(v1.get_default_graph().get_operation_by_name("squared_error").device)

    make(tmp_path, device_fn=lambda op: "/device:CPU:0").train(input_fn, hooks=[Placed()])
    assert placed == ["/device:CPU:0"]
    with pytest.raises(errors.ConfigError, match="device_fn places the ops of one tower, and there are 2"):
        make(tmp_path, 2, device_fn=lambda op: "/cpu:0").train(input_fn)
