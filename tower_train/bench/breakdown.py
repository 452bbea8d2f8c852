"""The breakdown of a step: the trainer's steps, first timed and then traced, in this process; and Python's part."""

import contextlib
import dataclasses
import io
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from tensorflow.python.client import timeline

import tower_train
from tower_train import host
from tower_train.bench import attribution, comparison, trainer
from tower_train.bench.attribution import Breakdown, Operation
from tower_train.bench.sides import BenchmarkOptions
from tower_train.examples import DataRequest
from tower_train.graph import record, training
from tower_train.run.plan import plan_trial

v1 = tf.compat.v1

_WARM_UP_STEPS, _TRACED_STEPS = 10, 5
_TOY_STEPS, _TOY_ROUNDS = 500, 7
_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv")  # run from the start of a step until their input comes
_OP_TYPE = re.compile(r" = (\w+)\(")


def run(options: BenchmarkOptions) -> list[str]:
    """Breaks down a step of each tower count into breakdown.json and Chrome trace files; returns the lines to print."""
    out = comparison.directory(options.out)
    breakdowns, written = [], [out / "breakdown.json"]
    for towers in options.tower_counts:
        breakdown, trace, data = measure(options, towers)
        breakdowns.append(breakdown)
        written.append(out / f"trace-{towers}.json")
        written[-1].write_text(timeline.Timeline(trace.step_stats).generate_chrome_trace_format(show_dataflow=False))
    python = python_times()
    comparison.write(
        written[0],
        {
            "options": dataclasses.asdict(options),
            "machine": host.describe(),
            "breakdowns": [dataclasses.asdict(one) for one in breakdowns],
            "python": python,
        },
    )
    return [
        f"Where the time of a step of {options.batch_size} examples goes. Data: {data}",
        "",
        *attribution.table(breakdowns),
        "",
        *(
            f"A step of a toy network {how}: {1e3 * secs:.3f} ms, {1e3 * main:.3f} ms of them Python's (main thread)."
            for how, (secs, main) in python.items()
        ),
        "",
        f"Written:  {', '.join(map(str, written))}",
        "The traces open in chrome://tracing and in https://ui.perfetto.dev.",
    ]


def measure(options: BenchmarkOptions, towers: int) -> tuple[Breakdown, v1.RunMetadata, str]:
    """Does steps with so many towers for a moment; returns the breakdown, its last step's trace, and a line on the
    data."""
    workload = trainer.find_workload(options.workload, options.model)
    with _opened(
        workload,
        dataset=options.dataset,
        data_dir=options.data_dir,
        device=options.device,
        num_gpus=towers,
        batch_size=options.batch_size // towers,
    ) as (built, session):
        fetches = built.train_op, built.report
        step_secs = _timed(session.make_callable(fetches), options.seconds_each)
        traces = [v1.RunMetadata() for _ in range(1 + _TRACED_STEPS)]
        for trace in traces:
            session.run(fetches, None, v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), trace)
    steps = [traced_operations(trace) for trace in traces[1:]]  # the first also sets tracing up
    each = [attribution.seconds_by_part(operations) for operations in steps]
    breakdown = Breakdown(
        towers=towers,
        step_secs=step_secs,
        seconds={name: statistics.fmean(one.get(name, 0.0) for one in each) for name in sorted(set().union(*each))},
    )
    return breakdown, traces[-1], ". ".join(filter(None, [built.examples.name, built.examples.notice]))


@contextlib.contextmanager
def _opened(workload: tower_train.Workload, **options) -> Iterator[tuple[record.TrainingGraph, v1.Session]]:
    """Builds a training as a run does, in a session, ready for its first step."""
    plan, _ = plan_trial(workload, workload.config(**({"summary_every_steps": 0, "keep_hardest": None} | options)))
    built = training.build_step(plan)
    with training.opened(built) as session:
        yield built, session


def _timed(one_step: Callable[[], object], seconds: float) -> float:
    """Does steps for some seconds; returns the seconds of one."""
    for _ in range(_WARM_UP_STEPS):
        one_step()
    start, steps = time.perf_counter(), 0
    while not steps or time.perf_counter() - start < seconds:
        one_step()
        steps += 1
    return (time.perf_counter() - start) / steps


def traced_operations(trace: v1.RunMetadata) -> list[Operation]:
    """Returns the operations of a traced step.

    A GPU's kernels are in a device '.../GPU:0/stream:all', named 'operation:type'; those in '.../GPU:0' only launch
    them.
    """
    devices = {device.device: device.node_stats for device in trace.step_stats.dev_stats}
    operations = []
    for device, nodes in devices.items():
        if f"{device}/stream:all" in devices or ("/stream:" in device and not device.endswith("/stream:all")):
            continue
        for node in nodes:
            op_type = _OP_TYPE.search(node.timeline_label)
            if op_type and op_type[1] in _TRANSFERS or node.node_name == "_SOURCE":
                continue
            start = (node.all_start_micros + node.op_start_rel_micros) / 1e6
            end = (node.all_start_micros + node.op_end_rel_micros) / 1e6
            operations.append(Operation(node.node_name.partition(":")[0], device, start, max(start, end)))
    return operations


def python_times() -> dict[str, list[float]]:
    """Returns [seconds, seconds of the main thread's processor time] for a step of a toy network in a run, with a log
    line every 500 steps, and for the same step called as a bare callable.

    Most of the processor time is Python's: kernels run in other threads.
    """
    toy, moments = tower_train.Workload("toy", _toy_examples, _toy_network), []
    options = dict(device="cpu", dtype="float32", batch_size=8)

    def note(step: int, report=None) -> None:
        if step % _TOY_STEPS == 0:
            moments.append([time.perf_counter(), time.thread_time()])

    def time_steps() -> list[float]:
        seconds = np.median(np.diff(moments, axis=0), axis=0) / _TOY_STEPS
        moments.clear()
        return seconds.tolist()

    steps = _TOY_STEPS * _TOY_ROUNDS
    with tempfile.TemporaryDirectory(prefix="tower_train-") as train_dir, contextlib.redirect_stdout(io.StringIO()):
        quiet = dict(log_every_steps=_TOY_STEPS, summary_every_steps=0, save_every_steps=0, eval_at_end=False)
        config = toy.config(train_dir=train_dir, max_steps=steps, **quiet, **options)
        tower_train.train(toy, config, after_step=note)
    in_a_run = time_steps()
    with _opened(toy, **options) as (built, session):
        one_step = session.make_callable((built.train_op, built.report))
        for number in range(steps):
            one_step()
            note(number)
    return {"in a run": in_a_run, "as a bare callable": time_steps()}


def _toy_examples(request: DataRequest) -> tower_train.Examples:
    features = np.random.default_rng(0).normal(size=[96, 4]).astype(np.float32)
    return tower_train.Examples.from_arrays("toy", features, np.arange(96) % 3, ("one", "two", "three"))


def _toy_network(features: tf.Tensor, training: bool) -> tf.Tensor:
    del training
    return features @ v1.get_variable("weights", [4, 3], features.dtype)
