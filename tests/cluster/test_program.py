"""A program's place in its cluster, and the front for programs, in a process by itself."""

import types

import clusters
import numpy as np
import pytest
import tensorflow as tf

import tower_train
from tower_train import Config, errors, horovod
from tower_train.cluster.task import Policy, Task
from tower_train.fronts import distributed, program
from tower_train.graph import collectives, devices
from tower_train.graph.collectives import Keys

v1 = tf.compat.v1
HOSTS = ("a:1", "a:2", "b:1", "a:3")


@pytest.fixture
def alone():
    return program.Cluster(Task(("localhost",), 0), devices.place(Config()), Policy(30.0, 30.0), 30.0)


@pytest.mark.parametrize(
    ("here", "index", "given", "expected"),
    [
        (0, 1, {}, (1, None, "auto")),
        (0, 1, {"num_gpus": 2}, (2, None, "auto")),
        (8, 1, {}, (2, None, "auto")),  # 8 GPUs for three workers: two each
        (8, 2, {}, (8, None, "auto")),
        (1, 3, {}, (1, None, "auto")),  # they share it
        (8, 3, {"gpus": [5]}, (None, (5,), "auto")),
        (8, 3, {"gpus": ()}, (None, None, "cpu")),
    ],
)
def test_workers_share_their_machines_gpus_out(here, index, given, expected, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind] * here)
    options = program._device_options(Task(HOSTS, index), **({"num_gpus": None, "gpus": None} | given))
    assert (options.num_gpus, options.gpus, options.device) == expected


def test_a_program_by_itself_is_the_chief_of_no_others_and_trains_as_without(alone):
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.is_chief and alone.target == "" and alone.devices == ("/cpu:0",)
    with tf.Graph().as_default():
        w = v1.get_variable("w", [2], tf.float64, v1.ones_initializer())
        optimizer = tower_train.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9), cluster=alone)
        train_op = optimizer.minimize(tf.reduce_sum(w**2), v1.train.get_or_create_global_step())
        assert optimizer.get_slot_names() == ["momentum"] and optimizer.variables() == [
            optimizer.get_slot(w, "momentum")
        ]
        hooks = [tower_train.BroadcastGlobalVariablesHook(cluster=alone)]
        with v1.train.MonitoredTrainingSession(alone.target, config=alone.session_config, hooks=hooks) as session:
            session.run([train_op])
            np.testing.assert_array_equal(session.run(w), [0.0, 0.0])
        assert not any("Collective" in each.type for each in tf.compat.v1.get_default_graph().get_operations())
    alone.shutdown()
    alone.shutdown()


def test_mistakes_are_said_in_one_line(alone):
    with tf.Graph().as_default(), pytest.raises(errors.GraphError, match="Call tower_train.cluster.init"):
        horovod.rank()
    with pytest.raises(errors.GraphError, match="got SGD. It needs an optimizer of tf.compat.v1.train"):
        tower_train.DistributedOptimizer(tf.keras.optimizers.SGD(), cluster=alone)
    optimizer = tower_train.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), cluster=alone)
    with pytest.raises(errors.GraphError, match="in a graph only"):
        optimizer.average([])
    with pytest.raises(errors.GraphError, match="root_rank=1: there are workers 0 to 0"):
        distributed.broadcast_variables([], 1, alone)
    for arguments, message in (
        ({"op": horovod.Adasum}, "op='Adasum'.*averaged or added. Take Average or Sum"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=2.: each pass is a step here"),
        ({"process_set": object()}, "process_set=.*gradients are those of all workers"),
    ):
        with pytest.raises(errors.GraphError, match=message):
            horovod.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), **arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        horovod.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), rate=1)
    with pytest.raises(errors.GraphError, match="op='adasum'.*Take Average or Sum"):
        horovod.allreduce(tf.constant(1.0), op="adasum")


def test_sessions_that_are_not_of_the_cluster_are_refused():
    """One without a master refuses operations between workers; one that sees another worker's devices is found."""
    server = tf.distribute.Server({"worker": clusters.hosts(1)}, "worker", 0)  # whose devices are worker 0's
    cluster = types.SimpleNamespace(target=server.target, device="/job:worker/replica:0/task:1", size=2)
    with tf.Graph().as_default():
        with tf.device(cluster.device):
            reduced = collectives.reduce(tf.identity(tf.constant([1.0])), cluster.size, "reduced")
        with v1.Session() as session:
            with pytest.raises(tf.errors.InvalidArgumentError) as refused:
                session.run(reduced)
            assert "master=cluster.target" in str(program._explained(refused.value, cluster))
        for master, seen in (("", "/job:localhost/"), (server.target, "/job:worker/.*/task:0/")):
            with (
                v1.Session(master) as session,
                pytest.raises(errors.ConfigError, match=f"sees {seen}.*master=.*config="),
            ):
                distributed._check_session(session, cluster)


def test_keys_are_those_of_names_whatever_the_order_and_never_one_anothers():
    one, other = Keys(), Keys()
    names = ["w", "e", "w", "b"]
    taken = {(name, names[:i].count(name)): one.take(name) for i, name in enumerate(names)}
    backwards = sorted(names)[::-1]
    assert taken == {(name, backwards[:i].count(name)): other.take(name) for i, name in enumerate(backwards)}
    assert len(set(taken.values())) == len(names) and all(0 <= key < 2**31 for key in taken.values())
