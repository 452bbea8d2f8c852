"""Training a few steps without a train_dir, and comparing two such trainings."""

import contextlib
import dataclasses
import types

import numpy as np
import tensorflow as tf

from tower_train.config import Config
from tower_train.graph import devices, step_plan, stream, training
from tower_train.graph.devices import HOST
from tower_train.graph.layout import Layout
from tower_train.run.plan import plan_trial

v1 = tf.compat.v1


@contextlib.contextmanager
def opened(workload, examples, **options):
    """A training on logical CPU devices, before its first step: (TrainingGraph, Session).

    Fetching `report` does a step. Options of Config come before the workload's recipe; by default without summaries.
    """
    config: Config = workload.config(**({"device": "cpu", "summary_every_steps": 0} | options))
    built = training.build_step(plan_trial(workload, config, examples)[0])
    with training.opened(built) as opened, built.graph.as_default():
        yield built, opened


def build(workload, examples, config, placed):
    """The graph of a step for devices that need not be there."""
    return training.build_step(step_plan.plan_step(workload, examples, config, placed))


def snapshot(built, session):
    """All variables, with the state of an iterator noted."""
    if built.stream.state:
        session.run(built.stream.state.write)
    return session.run({variable.op.name: variable for variable in built.saved.variables})


def resume(built, session, values):
    """Begins as the session of a run does: the checkpoint's values, the copies, the stream, its state."""
    session.run(
        [variable.initializer for variable in built.saved.variables],
        {variable.initializer.inputs[1]: values[variable.op.name] for variable in built.saved.variables},
    )
    session.run([variable.initializer for variable in built.graph.get_collection(v1.GraphKeys.LOCAL_VARIABLES)])
    session.run(built.stream.initializer)
    if built.stream.state:
        session.run(built.stream.state.resume)


def without_state(values):
    """Without the state of an iterator, which also tells of buffers."""
    return {name: value for name, value in values.items() if not name.startswith("iterator/")}


def on_host(tower_batch, num_towers=1, num_workers=1, worker=0):
    """The layout of a step whose batches stay on the host."""
    return Layout(tower_batch, (HOST,) * num_towers, batches_per_device=(1,) * num_workers, worker=worker)


def stream_batches(workload, examples, steps, layout, seed=0, start=0):
    """The batches of a stream from a position on: over steps and towers, (features, labels)."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(4)  # as build_step does
        found = stream.training_stream(workload, examples, seed, tf.constant(start, tf.int64), layout)
        session.run([v1.global_variables_initializer(), found.initializer])
        return [session.run(found.batches) for _ in range(steps)]


def train(workload, examples, steps, **options):
    """Does some steps of an `opened` training: (losses, {variable's name: value} after the last step)."""
    with opened(workload, examples, **options) as (built, session):
        losses = [float(session.run(built.report).loss) for _ in range(steps)]
        return losses, session.run({variable.op.name: variable for variable in built.saved.variables})


def noting(workload):
    """The workload, and a list that its towers' features and labels join, in turn, when they are built."""
    seen = []

    def inference(features, training):
        seen.append(features)
        return workload.inference(features, training)

    def loss(outputs, labels):
        seen.append(labels)
        return workload.loss(outputs, labels)

    return dataclasses.replace(workload, inference=inference, loss=loss), seen


def assert_same(found, expected, tolerance=1e-9):
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    assert len(set(expected[0])) == len(expected[0]), "the loss stood still"
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        limit = tolerance * max(1, np.max(np.abs(value)))
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=limit, err_msg=name)


def compared(workload, examples, builds_run=False, normalizes=False, **options):
    """The comparison of a workload's towers, two unless told, with one, as at the start of a run.

    builds_run: its graph, for its variables and operations; else it is told only whether the run normalises batches.
    """
    from tower_train.proof import towers

    config = workload.config(
        **dict(num_gpus=2, device="cpu", optimizer="momentum", learning_rate=0.01, summary_every_steps=0) | options
    )
    plan = step_plan.plan_step(workload, examples, config, devices.place(config))
    graph = types.SimpleNamespace(layout=plan.layout, compared=types.SimpleNamespace(normalizes=normalizes))
    graph.graph, graph.saved = tf.Graph(), types.SimpleNamespace(variables=())
    return towers.compare_towers(workload, examples, config, training.build_step(plan) if builds_run else graph)
