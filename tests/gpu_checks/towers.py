"""N towers against one, in float64: on the parts of one card, and on several cards."""

import numpy as np
import tensorflow as tf
import toy_workload
import trainings

import cifar10
from gpu_checks import trials
from gpu_checks.findings import attempt, check, unchecked
from tower_train.config import Config
from tower_train.graph import collectives, devices
from tower_train.workload import DataRequest

_PARTS, _PART_MEGABYTES = 4, 4000
_STEPS, _GLOBAL_BATCH = 10, 24
_SECS_EACH = 12  # about what one comparison may take
_REDUCES = ("add_n", "collective", "nccl")


def on_one_card(settings):
    where = "parts of one GPU" if trials.gpus() else "logical CPU devices"
    if trials.gpus():
        trials.split_first_gpu(_PARTS, _PART_MEGABYTES)
    else:
        unchecked("several towers on one GPU", "there is no GPU; on logical CPU devices instead")
    _compare(settings, where, (_PARTS, 2), _REDUCES[:2])


def on_several_cards(settings):
    count = trials.power_of_two(min(len(trials.gpus()), 8))  # a divisor of the global batch
    if count < 2:
        unchecked("several GPUs against one", f"there {'is one' if count else 'is none'}")
        return
    _compare(settings, "GPUs", sorted({2, count}, reverse=True), _REDUCES)


def _compare(settings, where, counts, reduces):
    """The greatest number of towers first: all devices are placed before the first one is used."""
    kinds = {"cpu": {}} | {f"mirrored, {kind}": {"variable_update": "mirrored", "all_reduce": kind} for kind in reduces}
    if settings.quick:
        counts, kinds = counts[:1], {name: kinds[name] for name in ("cpu", "mirrored, add_n")}

    def train(model, count, **kind):
        workload, split = toy_workload.WORKLOAD, DataRequest("train", "toy")
        if model != "toy":
            workload = cifar10.WORKLOAD.with_options({"model": model})
            split = DataRequest("train", "generated", settings.data_dir)
        options = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, seed=1, device="auto", num_gpus=count)
        options |= dict(batch_size=_GLOBAL_BATCH // count) | kind
        return trainings.train(workload, workload.examples(split), _STEPS, **options)[1]

    for model in ("toy",) if settings.quick else ("toy", "convnet"):
        one = None
        for count, (name, kind) in ((count, item) for count in counts for item in kinds.items()):
            what = f"{model}: {count} towers on {where}, {name}, are one after {_STEPS} steps"
            if settings.left() < _SECS_EACH:
                unchecked(what, "no time was left")
                continue
            with attempt(what):
                many = train(model, count, **kind)
                one = one or train(model, 1)
                trials.compare(what, many, one)


def known_means(settings):
    """NCCL in TensorFlow was reported to give wrong means without any error (tensorflow#41539, #62493)."""
    count, where = trials.places(_PART_MEGABYTES)
    for kind in _REDUCES:
        what = f"the means of {where} by {kind} are the known ones"
        if kind == "nccl" and len(trials.gpus()) < 2:
            unchecked(what, "it needs several GPUs")
            continue
        with attempt(what):
            wrong = wrong_means(count, kind)
            check(not wrong, what, wrong_places=wrong)


def wrong_means(count: int, kind: str) -> int:
    """Returns how many means of a large message and small ones are wrong on any of the devices.

    Only device j % count has a number at place j, the others 0, so that any part that is lost, repeated or misplaced
    shows.
    """
    placed = devices.place(Config(num_gpus=count))
    sizes = (collectives.MESSAGE_BYTES // 4, 1000, 1000)
    numbers = [1 + np.arange(size, dtype=np.float32) // count % 8 for size in sizes]
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(tf.float32, [size]) for size in sizes]  # no constants to be averaged beforehand
        values = []
        for i, device in enumerate(placed.towers):
            with tf.device(device):
                values.append([tf.where(tf.equal(tf.range(each.shape[0]) % count, i), each, 0) for each in fed])
        means = collectives.AllReduce(placed.towers, kind).mean(values)
        with tf.compat.v1.Session(graph=graph, config=placed.session_config) as session:
            found = session.run(means, dict(zip(fed, numbers, strict=True)))
    wrong = [~np.isclose(mean * count, n, rtol=1e-6) for each in found for mean, n in zip(each, numbers, strict=True)]
    return sum(int(np.count_nonzero(each)) for each in wrong)
