"""Programs with a session of their own: their place in a cluster, and several workers of them against plain numpy."""

import re
import types

import clusters
import horovod_program
import jobs
import numpy as np
import pytest
import session_program
import tensorflow as tf

import tower_train
from tower_train import Config, errors, horovod
from tower_train.cluster import program
from tower_train.cluster.task import Policy, Task
from tower_train.fronts import distributed
from tower_train.fronts.keras_towers import exchange
from tower_train.graph import collectives, devices

v1 = tf.compat.v1
HOSTS = ("a:1", "a:2", "b:1", "a:3")


@pytest.fixture
def alone(monkeypatch):
    cluster = program.Cluster(Task(("localhost",), 0), devices.place(Config()), Policy(30.0, 30.0), 30.0)
    monkeypatch.setattr(program, "_current", cluster)
    return cluster


def test_workers_share_their_machines_gpus_out(monkeypatch):
    for here, index, given, expected in (
        (0, 1, {}, (1, None, "auto")),
        (8, 1, {}, (2, None, "auto")),  # 8 GPUs for three workers: two each
        (8, 2, {}, (8, None, "auto")),
        (1, 3, {}, (1, None, "auto")),  # they share it
        (8, 3, {"gpus": [5]}, (None, (5,), "auto")),
        (8, 3, {"gpus": ()}, (None, None, "cpu")),
    ):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind, here=here: [kind] * here)
        options = program._device_options(Task(HOSTS, index), **({"num_gpus": None, "gpus": None} | given))
        assert (options.num_gpus, options.gpus, options.device) == expected


def test_a_program_by_itself_is_the_chief_of_no_others_and_trains_as_without(alone):
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.is_chief and alone.target == "" and alone.devices == ("/cpu:0",)
    with tf.Graph().as_default():
        w = v1.get_variable("w", [2], tf.float64, v1.ones_initializer())
        optimizer = tower_train.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9))
        train_op = optimizer.minimize(tf.reduce_sum(w**2), v1.train.get_or_create_global_step())
        assert optimizer.get_slot_names() == ["momentum"] and optimizer.variables() == [
            optimizer.get_slot(w, "momentum")
        ]
        hooks = [tower_train.BroadcastGlobalVariablesHook()]
        with v1.train.MonitoredTrainingSession(alone.target, config=alone.session_config, hooks=hooks) as session:
            session.run([train_op])
            np.testing.assert_array_equal(session.run(w), [0.0, 0.0])
        assert not any("Collective" in each.type for each in tf.compat.v1.get_default_graph().get_operations())
    alone.shutdown()
    alone.shutdown()


def test_horovods_arguments_without_effect_are_taken_and_floats_sent_in_fewer_bits(alone):
    horovod.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), num_groups=2, op=horovod.Average)
    sent = [horovod.allreduce(tf.constant(third), compression=horovod.Compression.bf16) for third in (1 / 3, 333)]
    assert [*map(float, sent)] == [0.333984375, 333]


def test_the_sums_of_keras_workers_count_as_gradients_that_wait_for_their_means(alone, monkeypatch):
    seen = []
    note = lambda values: seen.append(list(alone.counts)) or values  # noqa: E731
    monkeypatch.setattr(collectives, "reduce", lambda fed, *_: tf.numpy_function(note, [fed], fed.dtype))
    exchange.Workers(alone).sum_arrays([np.ones(2), np.ones(3)])
    assert (seen, alone.counts) == ([[1, 0]], [1, 1])


def test_mistakes_are_said_in_one_line(alone, monkeypatch):
    for send in (lambda: distributed.broadcast_variables([], 1), lambda: horovod.broadcast(tf.constant(1.0), 1)):
        with pytest.raises(errors.GraphError, match="root_rank=1: there are workers 0 to 0"):
            send()
    for arguments, message in (
        ({"op": horovod.Adasum}, "op='Adasum'. has no meaning here.* on the mean"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=2. has no meaning here: each pass is a step"),
        ({"process_set": object()}, "process_set=.* has no meaning here"),
        ({"rate": 1}, "rate=1. has no meaning here"),
    ):
        with pytest.raises(errors.GraphError, match=message):
            horovod.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), **arguments)
    with pytest.raises(errors.GraphError, match="op='adasum'.*Take Average or Sum"):
        horovod.allreduce(tf.constant(1.0), op="adasum")
    monkeypatch.setattr(program, "_current", None)
    with pytest.raises(errors.GraphError, match="Call tower_train.cluster.init"):
        horovod.rank()


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


def trained(initial_w, initial_e, steps):
    """Momentum of w and Adam of e in turns, on all examples at once, by hand."""
    features, rows = session_program.data()
    rate, beta1, beta2, epsilon = session_program.ADAM
    w, e = initial_w.copy(), initial_e.copy()
    velocity, first, second = np.zeros_like(w), np.zeros_like(e), np.zeros_like(e)
    for step in range(1, steps + 1):
        velocity = session_program.MOMENTUM * velocity + 2 / len(rows) * features.T @ (features @ w - e[rows])
        w = w - session_program.RATE * velocity
        grad = np.zeros_like(e)
        np.add.at(grad, rows, -2 / len(rows) * (features @ w - e[rows]))
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        step_rate = rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        e = e - step_rate * first / (np.sqrt(second) + epsilon)
    return w, e, velocity


def assert_named(text, outputs):
    """Each says it in its one line of an error, and nothing else of it."""
    for output in outputs:
        [line] = [line for line in output.splitlines() if line.startswith("tower_train: error: ")]
        assert text in re.sub(r"localhost:\d+", "HOST", line)
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("size", "fault", "status", "text"),
    [
        (2, "early", 2, "worker 1 (HOST) has ended after step 12, but step 13 waits for it"),
        (2, "asleep", 138, "worker 1 (HOST) waits for its program or its input: it has no gradients for this step"),
        (3, "killed", 138, "worker 2 (HOST) is missing: no sign of life"),
    ],
)
def test_workers_train_what_numpy_trains_on_all_examples_until_one_is_lost_and_named(
    size, fault, status, text, tmp_path
):
    """From the chief's values, and of three so that one learns who is lost from the chief."""
    with clusters.programs(size, "session_program", str(tmp_path), fault) as workers:
        statuses = [each.process.wait(jobs.WAIT_SECS) for each in workers]
        outputs = [each.output() for each in workers]
    assert statuses == [status] * (size - 1) + [-9 if fault == "killed" else status], outputs
    assert_named(text, outputs[: size - 1])
    if fault == "killed":
        assert_named("Start the program again on every machine", outputs[: size - 1])
    assert [("cleaned up" in each) for each in outputs] == [True] * (size - 1) + [fault != "killed"]
    values = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(size)]
    w, e, velocity = trained(values[0]["w 0"], values[0]["e 0"], 2 * session_program.STEPS)
    for each in values:
        jobs.assert_identical(each, values[0])
        np.testing.assert_allclose(each["w end"], w, rtol=1e-9)
        np.testing.assert_allclose(each["e end"], e, rtol=1e-9)
        np.testing.assert_allclose(each["w/Momentum end"], velocity, rtol=1e-9)
        assert each["global_step end"] == 2 * session_program.STEPS


BASE = np.array([[0, 1, 0], [1, 0, 1]])  # what of_rank adds the rank to
EXPECTED = (
    {f"sum {dtype.name}": 2 * BASE + 1 for dtype in horovod_program.REDUCED}
    | {f"mean {dtype.name}": BASE + 1 for dtype in horovod_program.REDUCED}
    | {f"rows {dtype.name}": [[0, 1], [1, 2], [1, 2]] for dtype in horovod_program.SENT if dtype.name != "bool"}
    | {f"sent {dtype.name}": BASE + 1 for dtype in horovod_program.SENT if dtype.name != "bool"}
    | {"rows bool": [[False, True], [True, True], [True, True]], "sent bool": BASE + 1 > 0}
    | {"rows by name": [[1.0], [2.0], [2.0]]}
    | {"slices": [[1.5], [1.0], [0.0]], "compressed": [1.0, 0.333984375]}  # bfloat16's 1/3
    | {"dense": [1.0, 0.5, 0.5], "towers": [5.5] * 3, "half": [60000.0, 1.0], "scaled": [0.5] * 3}
)


def test_horovods_operations_make_what_their_formulas_say(tmp_path):
    with clusters.programs(2, "horovod_program", str(tmp_path)) as workers:
        statuses = [each.process.wait(jobs.WAIT_SECS) for each in workers]
        outputs = [each.output() for each in workers]
    assert statuses == [2, 2], outputs
    assert_named("give tensors of different sizes to one operation between them", outputs)
    horovods = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    for values in horovods:
        assert values.keys() == EXPECTED.keys() | {"before", "after"}
        for name, value in EXPECTED.items():
            np.testing.assert_array_equal(values[name], value, err_msg=name)
        np.testing.assert_array_equal(values["after"], horovods[1]["before"])  # the variables of the root
    assert not np.array_equal(horovods[0]["before"], horovods[1]["before"])
