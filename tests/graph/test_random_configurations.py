"""Any configuration on any towers, resumed on any others, is one tower that nobody stopped; `--thorough` draws more."""

import dataclasses

import element_workloads
import hypothesis
import norm_workload
import toy_workload
import trainings
from hypothesis import strategies

from tower_train import layers
from tower_train.workload import DataRequest

GLOBAL_BATCH, STARTS = 12, 4  # of 96 examples: schedules bend on the way
OPTIMIZERS = [
    dict(optimizer="sgd"),
    dict(optimizer="momentum", momentum=0.8),
    dict(optimizer="momentum", nesterov=True),
    dict(optimizer="adamw", learning_rate=0.01, weight_decay=0.3),
    dict(optimizer="muon"),
    dict(optimizer="muon", nesterov=True),
]
SCHEDULES = [
    {},
    dict(num_epochs_per_decay=0.25, learning_rate_decay_factor=0.5),
    dict(lr_schedule="cosine"),
    dict(lr_schedule="linear", warmup_epochs=0.3),
    dict(lr_schedule="points", lr_points="0:0.2,0.4:1,1:0.1"),
    dict(lr_scaling="sqrt", lr_base_batch=48),
]
MODES = [
    dict(variable_update="cpu"),
    dict(variable_update="mirrored"),
    dict(variable_update="mirrored", all_reduce="add_n"),
]
SOURCES = {
    "by index": toy_workload.load,
    "in their order": lambda request: element_workloads.IN_ORDER.examples(request),
}


def network(features, training):
    return layers.dropout(toy_workload.network(features, training), 0.2, training)


NETWORKS = {"dropout": network, "batch normalisation": norm_workload.network}


@strategies.composite
def towers(draw, network):
    """Options that cut the global batch. Batch normalisation is over all of a turn."""
    accumulated = 1 if network == "batch normalisation" else draw(strategies.sampled_from([1, 2, 3]))
    count = draw(strategies.sampled_from([each for each in (1, 2, 3, 4) if 12 % (each * accumulated) == 0]))
    cut = dict(num_gpus=count, accumulate_steps=accumulated, batch_size=GLOBAL_BATCH // count // accumulated)
    return cut | draw(strategies.sampled_from(MODES))


@strategies.composite
def cases(draw):
    """(network, source of data, options, [(towers, how many steps they do)])"""
    choose = lambda values: draw(strategies.sampled_from(values))  # noqa: E731
    options = choose(OPTIMIZERS) | choose(SCHEDULES) | dict(seed=choose([0, 2**40]), clip_gradients=choose([0.0, 0.5]))
    options |= dict(ema=choose([0.0, 0.9]), label_smoothing=choose([0.0, 0.1]))
    network = choose(list(NETWORKS))
    starts = [(draw(towers(network)), choose([1, 2])) for _ in range(STARTS)]
    return network, choose(list(SOURCES)), options | dict(max_steps=sum(steps for _, steps in starts)), starts


def train(workload, steps, values, options):
    """The losses of these steps after these values, or from the beginning, and all values at the end."""
    with trainings.opened(workload, workload.examples(DataRequest("train")), dtype="float64", **options) as opened:
        if values is not None:
            trainings.resume(*opened, values)
        built, session = opened
        losses = [float(session.run(built.report).loss) for _ in range(steps)]
        return losses, trainings.snapshot(built, session)


def check(case):
    network, source, options, starts = case
    workload = dataclasses.replace(toy_workload.WORKLOAD, examples=SOURCES[source], inference=NETWORKS[network])
    found, values = [], None
    for towers, steps in starts:
        losses, values = train(workload, steps, values, options | towers)
        found += losses
    expected, ended = train(workload, len(found), None, options | dict(num_gpus=1, batch_size=GLOBAL_BATCH))
    ended, values = trainings.without_state(ended), trainings.without_state(values)
    trainings.assert_same((found, values), (expected, ended), tolerance=1e-8)


def test_random_towers_one_resuming_the_other_are_one_tower(request):
    """Four towers' cuts a case, each resuming the one before."""
    thorough = request.config.getoption("--thorough")
    settings = hypothesis.settings(
        max_examples=100 if thorough else 2,
        derandomize=not thorough,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(cases())(check))()
