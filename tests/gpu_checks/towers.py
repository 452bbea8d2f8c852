"""N towers against one, in float64: on the parts of one card, and on several cards."""

import numpy as np
import tensorflow as tf

from gpu_checks import trials
from tower_train.config import Config
from tower_train.graph import collectives, devices

_PARTS, _PART_MEGABYTES = 4, 4000
_STEPS, _GLOBAL_BATCH = 10, 24
_SECS_EACH = 12  # about what one comparison may take


def on_one_card(findings, settings):
    where = "parts of one GPU" if trials.gpus() else "logical CPU devices"
    if trials.gpus():
        trials.split_first_gpu(_PARTS, _PART_MEGABYTES)
    else:
        findings.unchecked("several towers on one GPU", "there is no GPU; on logical CPU devices instead")
    _compare(findings, settings, where, (_PARTS, 2), ("add_n", "collective"))


def on_several_cards(findings, settings):
    count = trials.power_of_two(min(len(trials.gpus()), 8))  # a divisor of the global batch
    if count < 2:
        findings.unchecked("several GPUs against one", f"there {'is one' if count else 'is none'}")
        return
    _compare(findings, settings, "GPUs", sorted({2, count}, reverse=True), trials.choices("all_reduce"))


def _compare(findings, settings, where, counts, reduces):
    """The greatest number of towers first: all devices are placed before the first one is used."""
    kinds = {"cpu": {}} | {f"mirrored, {kind}": {"variable_update": "mirrored", "all_reduce": kind} for kind in reduces}
    if settings.quick:
        counts, kinds = counts[:1], {name: kinds[name] for name in ("cpu", "mirrored, add_n")}
    options = dict(dtype="float64", optimizer="momentum", learning_rate=0.01, seed=1)

    def train(model, count, **kind):
        batch = _GLOBAL_BATCH // count
        return trials.variables_after(
            _STEPS, model, settings.data_dir, num_gpus=count, batch_size=batch, **options, **kind
        )

    for model in ("toy",) if settings.quick else ("toy", "convnet"):
        one = None
        for count, (name, kind) in ((count, item) for count in counts for item in kinds.items()):
            what = f"{model}: {count} towers on {where}, {name}, are one after {_STEPS} steps"
            if settings.left() < _SECS_EACH:
                findings.unchecked(what, "no time was left")
                continue
            with findings.attempt(what):
                many = train(model, count, **kind)
                one = one or train(model, 1)
                trials.compare(findings, what, many, one)


def known_means(findings, settings):
    """NCCL in TensorFlow was reported to give wrong means without any error (tensorflow#41539, #62493)."""
    count, where = trials.places(_PART_MEGABYTES)
    for kind in trials.choices("all_reduce"):
        what = f"the means of {where} by {kind} are the known ones"
        if kind == "nccl" and len(trials.gpus()) < 2:
            findings.unchecked(what, "it needs several GPUs")
            continue
        with findings.attempt(what):
            wrong = wrong_means(count, kind)
            findings.check(not wrong, what, wrong_places=wrong)


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
