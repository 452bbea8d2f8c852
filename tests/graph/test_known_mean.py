"""The all-reduce of a run is tried on known numbers before the first step."""

import threading

import clusters
import jobs
import pytest
import tensorflow as tf

from tower_train import errors
from tower_train.graph import known_mean
from tower_train.graph.all_reduce import AllReduce
from tower_train.graph.known_mean import KnownMean

v1 = tf.compat.v1
MIRRORED = dict(num_gpus=3, batch_size=4, variable_update="mirrored", max_steps=2)


def check(count, kind, dtype=tf.float32, sent=None, timeout_secs=60.0):
    """Tries an all-reduce between logical CPU devices."""
    with tf.Graph().as_default():
        known = KnownMean(AllReduce([f"/cpu:{i}" for i in range(count)], kind, sent), 0, dtype)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": count})) as session:
            known.check(session, timeout_secs, pytest.fail)


@pytest.mark.parametrize(
    ("count", "kind", "dtype", "sent"),
    [
        (2, "collective", tf.float32, None), (3, "collective", tf.float32, tf.bfloat16),
        (5, "add_n", tf.float32, tf.bfloat16), (3, "add_n", tf.float64, None),
    ],
)  # fmt: skip
def test_right_means_are_passed_over_in_silence(count, kind, dtype, sent):
    check(count, kind, dtype, sent)


def changed(monkeypatch, change):
    """Lets an all-reduce average something else than what the devices have."""
    mean = AllReduce._mean
    monkeypatch.setattr(AllReduce, "_mean", lambda self, buffers: mean(self, change(list(buffers))))


@pytest.mark.parametrize(
    ("change", "which", "came"),
    [
        (lambda own: [own[0], tf.zeros_like(own[1]), own[2]], "/cpu:1", "0"),
        (lambda own: [*own[:2], 2 * own[2]], "/cpu:2", "0.666667"),
        (lambda own: [*own[:2], tf.roll(own[2], -3 * 5, axis=0)], "/cpu:2", "2"),
        (lambda own: [*own[:2], own[2] + float("nan")], "/cpu:0", "nan"),
    ],
    ids=["lost", "repeated", "displaced", "nan"],
)
@pytest.mark.parametrize("sent", [None, tf.bfloat16])
def test_a_wrong_mean_is_told_with_whose_part_it_is(change, which, came, sent, monkeypatch):
    """Each device's numbers are 1, 2, ..., so that five of them further on 6 stands for 1."""
    changed(monkeypatch, change)
    with pytest.raises(errors.AllReduceError) as error:
        check(3, "collective", sent=sent)
    text = str(error.value)
    name = "bfloat16" if sent else "float32"
    assert text.startswith(f"The averaging between /cpu:0, /cpu:1, /cpu:2 (collective, {name}) is wrong, before the ")
    assert f"which only {which} adds to" in text and text.endswith("Try --all_reduce=add_n, or --variable_update=cpu.")
    if not sent:
        assert f"came out as {came}, expected was 0.333333" in text


@pytest.mark.parametrize(("start", "size"), [(0, 1000), (2**20 - 1, 1)], ids=["small", "large"])
def test_both_sizes_of_messages_are_looked_at(start, size, monkeypatch):
    def spoilt(buffers):
        if (buffers[0].shape[0] == 1000) == (size == 1000):
            buffers[1] = tf.concat([buffers[1][:start], 0.5 + buffers[1][start:]], axis=0)
        return buffers

    changed(monkeypatch, spoilt)
    with pytest.raises(errors.AllReduceError, match=f"of {1000 if size == 1000 else 2**20:,} known means {size:,} "):
        check(2, "add_n")


def test_a_run_with_a_broken_all_reduce_ends_before_its_first_step(tmp_path, monkeypatch):
    changed(monkeypatch, lambda own: [*own[:2], tf.zeros_like(own[2])])
    with pytest.raises(errors.AllReduceError, match=r"only /cpu:2 adds to, came out as 0, .* Try --variable_update"):
        jobs.train_toy(tmp_path, all_reduce="add_n", **MIRRORED)
    assert not jobs.saved_steps(tmp_path) and not (tmp_path / "metrics.jsonl").exists()
    assert errors.AllReduceError.exit_status == 5


def test_workers_whose_mean_lacks_one_of_them_do_not_begin(tmp_path, monkeypatch):
    """The second one's part, on the way over the network. Each worker is a thread here."""
    here, build, means = threading.local(), KnownMean.__init__, AllReduce._collective_means

    def of_worker(self, of_steps, worker, dtype):
        here.worker = worker
        build(self, of_steps, worker, dtype)

    def lossy(self, buffers, *about):
        return means(self, [0 * own if getattr(here, "worker", 0) else own for own in buffers], *about)

    monkeypatch.setattr(KnownMean, "__init__", of_worker)
    monkeypatch.setattr(AllReduce, "_collective_means", lossy)
    results = clusters.train_together(tmp_path, 2, "toy_workload", num_gpus=1, max_steps=2, batch_size=4)
    texts = [str(result) for result in results if isinstance(result, errors.AllReduceError)]
    assert texts and "only /cpu:0 of worker 1 adds to, came out as 0" in texts[0]
    assert "of each of 2 workers" in texts[0] and texts[0].endswith("Look at the network between the workers.")


def test_an_averaging_in_which_one_device_takes_no_part_ends(monkeypatch):
    reduce = tf.raw_ops.CollectiveReduce

    def without_one(group_size, **others):
        return reduce(group_size=group_size + 1, **others)

    monkeypatch.setattr(tf.raw_ops, "CollectiveReduce", without_one)
    text = r"between /cpu:0, /cpu:1 \(collective, float32\) has not ended for 0.5 s, .* Try --all_reduce=add_n"
    with pytest.raises(errors.WorkerError, match=text):
        check(2, "collective", timeout_secs=0.5)


def test_a_process_leaves_where_tensorflow_does_not_come_back(monkeypatch):
    """As from a kernel that waits for another device's, which nothing can stop."""
    left, came_back = [], threading.Event()
    monkeypatch.setattr(known_mean, "_GRACE_SECS", 0.1)
    monkeypatch.setattr(v1.Session, "run", lambda *args, **kwargs: came_back.wait(10) and [])

    def leave(error):
        left.append(error)
        came_back.set()

    with tf.Graph().as_default(), v1.Session() as session:
        all_reduce = AllReduce(("/cpu:0", "/cpu:1"), "collective")
        KnownMean(all_reduce, 0, tf.float32).check(session, 0.1, leave)
    [error] = left
    assert "has not ended for 0.1 s" in str(error) and error.exit_status == 138
