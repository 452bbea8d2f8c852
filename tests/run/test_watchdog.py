"""A run that stands still says what it waits for."""

import dataclasses
import logging
import re
import threading

import jobs
import tensorflow as tf
import toy_workload
import trainings

from tower_train import Config
from tower_train.cluster import failures
from tower_train.graph import devices
from tower_train.graph.collectives import AllReduce
from tower_train.run import signals
from tower_train.run_dir import checkpoint
from tower_train.workload import DataRequest

STALL = dict(stall_timeout_secs=0.6, max_steps=4, num_gpus=2, batch_size=8, summary_every_steps=0, save_every_steps=2)
REPORTS = []  # of the watchdog, until now


class Reports(logging.Handler):
    def emit(self, record):
        REPORTS.append(record.getMessage())


def wait_for_report(what):
    """Waits however long that takes on a busy machine."""
    jobs.wait_for(lambda: any(f"s: waiting for {what}." in each for each in REPORTS))


def reported_once(positions, first, what):
    """positions; those that begin with a certain one only when the watchdog has said what is waited for."""

    def wait(values):
        if values[0] == first:
            wait_for_report(what)
        return values

    return tf.ensure_shape(tf.numpy_function(wait, [positions], positions.dtype), positions.shape)


def slow_input(features, draws):
    positions = reported_once(draws.positions, 16, failures.FOR_INPUT)  # where step 2 begins
    return tf.concat([features, tf.cast(positions, features.dtype)[:, tf.newaxis]], axis=1)


def slow_second_tower(features, training):
    if not training:
        return toy_workload.network(features, training)
    positions = reported_once(features[:, 4], 40, "tower_1")  # where that begins in step 3
    return toy_workload.network(features[:, :4] + tf.stop_gradient(0 * positions)[:, tf.newaxis], training)


def test_what_does_not_end_is_reported_in_a_step_with_what_it_waits_for(tmp_path, monkeypatch, capfd):
    workload = dataclasses.replace(toy_workload.WORKLOAD, augment=slow_input, inference=slow_second_tower)
    slow = {
        (checkpoint.Checkpoints, "save"): "a save",
        (tf.profiler.experimental, "start"): "the profiler to start",
        (tf.profiler.experimental, "stop"): "a profile to be written",
    }
    for owner, name in slow:
        function, what = getattr(owner, name), slow[owner, name]
        monkeypatch.setattr(owner, name, lambda *args, f=function, what=what: wait_for_report(what) or f(*args))
    monkeypatch.setattr(logging.getLogger("tower_train"), "handlers", [Reports()])
    REPORTS.clear()
    result = jobs.train_small(tmp_path, workload=workload, profile_steps=(3, 4), **STALL | dict(save_every_steps=0))
    assert result.step == 4
    assert "Thread 0x" in (stacks := capfd.readouterr().err) and " in run\n" in stacks
    ends = ("*** Nothing has ended for ", "*** Going on, after ")
    stalls = [each.startswith(ends[0]) for each in REPORTS if each.startswith(ends)]
    assert stalls == [True, False] * (len(stalls) // 2)  # each has an end; a busy machine may have more


def test_without_a_watchdog_nothing_is_counted_and_with_one_the_checkpoint_is_the_same(tmp_path):
    names = []
    for secs in (0.0, 5.0):
        config = Config(num_gpus=2, batch_size=8, stall_timeout_secs=secs)
        examples = toy_workload.load(DataRequest("train"))
        graph = trainings.build(toy_workload.WORKLOAD, examples, config, devices.place(config))
        assert sorted(graph.progress) == (["input", "tower_0", "tower_1"] if secs else [])
        names.append([variable.op.name for variable in graph.saved.variables])
    assert names[0] == names[1]


def test_an_averaging_between_devices_that_hangs_ends_the_process_with_their_names(tmp_path, monkeypatch):
    """Here it goes on when the process would have been ended, in the third step."""
    left, freed, mean, calls = [], threading.Event(), AllReduce._mean, []

    def wait(value):
        calls.append(value)
        if len(calls) == 3:
            assert freed.wait(jobs.WAIT_SECS)
        return value

    def hanging(self, buffers):
        means = mean(self, buffers)
        if buffers[0].shape != [1]:  # the gradients' one message
            means[0] = tf.ensure_shape(tf.numpy_function(wait, [means[0]], means[0].dtype), means[0].shape)
        return means

    def leave(error):
        left.append(error)
        freed.set()

    monkeypatch.setattr(AllReduce, "_mean", hanging)
    monkeypatch.setattr(signals.Received, "raise_in_main", lambda _, error: leave(error))
    options = STALL | dict(variable_update="mirrored", worker_timeout_secs=0.5)
    assert jobs.train_small(tmp_path, **options).step == 4
    text = str(left[0])
    assert text.startswith("The step under way waits for the averaging between devices, ")
    assert re.search("all towers are done: logical CPU device 0, logical CPU device 1 have not averaged for .* s", text)
    assert left[0].exit_status == 138
