"""The breakdown of a step: the trainer's own steps, first timed and then traced, in this process; and Python's part."""

import contextlib
import dataclasses
import io
import re
import statistics
import tempfile
import time
from collections.abc import Generator

import numpy as np
import tensorflow as tf
from tensorflow.python.client import timeline

import tower_train
from tower_train import host
from tower_train.bench import attribution, comparison, report, trainer
from tower_train.bench.attribution import Breakdown, Operation
from tower_train.bench.sides import BenchmarkOptions
from tower_train.graph import devices, training, transfer
from tower_train.workload import DataRequest

v1 = tf.compat.v1

_WARM_UP_STEPS, _TRACED_STEPS = 10, 5
_TOY_STEPS, _TOY_ROUNDS = 500, 7
_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv")  # run from the start of a step until their input comes
_OP_TYPE = re.compile(r" = (\w+)\(")


def run(options: BenchmarkOptions) -> list[str]:
    """Divides a step of each tower count into breakdown.json and Chrome trace files; returns the lines to print."""
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
            "options": dataclasses.asdict(options), "machine": host.describe(),
            "breakdowns": [dataclasses.asdict(one) for one in breakdowns],
            "python": python,
        },
    )  # fmt: skip
    return [
        f"Where the time of a step of {options.batch_size} examples goes. Data: {data}", "",
        *attribution.table(breakdowns), "",
        attribution.sentence(breakdowns[0], breakdowns[-1]), "",
        *(f"A step of a toy network {how}: {1e3 * secs:.3f} ms, {1e3 * main:.3f} ms of them Python's (main thread)."
          for how, (secs, main) in python.items()), "",
        *report.written(written),
        "The traces open in chrome://tracing and in https://ui.perfetto.dev.",
    ]  # fmt: skip


def measure(options: BenchmarkOptions, towers: int) -> tuple[Breakdown, v1.RunMetadata, str]:
    """Trains with so many towers for a moment; returns the breakdown, its last step's trace, and a line on the data."""
    workload, tracer = trainer.workload_of(options.workload, options.model), _Tracer(options.seconds_each)
    result = _train(
        workload, [tracer], io.StringIO(), dataset=options.dataset, data_dir=options.data_dir, device=options.device,
        num_gpus=towers, batch_size=options.batch_size // towers,
    )  # fmt: skip
    steps = [operations_of(trace) for trace in tracer.traces]
    each = [attribution.seconds_by_part(operations) for operations in steps]
    breakdown = Breakdown(
        towers=towers,
        on_gpus=any("GPU" in operation.device for operation in steps[0]),
        cores=host.cores(),
        **tracer.times,
        seconds={name: statistics.fmean(one.get(name, 0.0) for one in each) for name in sorted(set().union(*each))},
    )
    return breakdown, tracer.traces[-1], f"{result.data}. {result.notice}" if result.notice else result.data


def _train(
    workload: tower_train.Workload, hooks: list[v1.train.SessionRunHook], output: io.StringIO, **options
) -> tower_train.Result:
    """Trains as a run does until a hook or max_steps ends it, and prints into `output`."""
    with tempfile.TemporaryDirectory(prefix="tower_train-") as train_dir, contextlib.redirect_stdout(output):
        defaults = dict(train_dir=train_dir, max_steps=trainer.NO_END, summary_every_steps=0, save_every_steps=0,
                        eval_at_end=False)  # fmt: skip
        return tower_train.train(workload, workload.config(**(defaults | options)), hooks)


def operations_of(trace: v1.RunMetadata) -> list[Operation]:
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


class _Tracer(v1.train.SessionRunHook):
    """Times steps for some seconds, traces a few, times steps with their input in place, and asks for the end.

    Attributes:
      times: step_secs, busy, busy_here and in_place_secs of a Breakdown.
      traces: of some steps.
    """

    def __init__(self, seconds: float):
        self.times: dict[str, float] = {}
        self.traces: list[v1.RunMetadata] = []
        self._seconds = seconds

    def after_create_session(self, session, coord):
        self._steps = self._measured(inputs_of(session.graph))
        self._next = next(self._steps)

    def before_run(self, run_context):
        return self._next

    def after_run(self, run_context, run_values):
        try:
            self._next = self._steps.send(run_values)
        except StopIteration:
            run_context.request_stop()

    def _measured(self, inputs: list[tf.Tensor]) -> Generator:
        """Yields what each step runs besides itself, and gets its results."""
        wall, here, all_cores = yield from self._timed(None)
        cores = host.cores() * wall
        busy_here = here / cores
        self.times = dict(busy=max(busy_here, min(1.0, all_cores / cores)), busy_here=busy_here)
        for _ in range(1 + _TRACED_STEPS):
            traced = yield v1.train.SessionRunArgs(None, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))
            self.traces.append(traced.run_metadata)
        del self.traces[0]  # which also sets tracing up
        values = yield v1.train.SessionRunArgs(inputs)
        in_place = dict(zip(inputs, values.results, strict=True))
        in_place_secs, *_ = yield from self._timed(v1.train.SessionRunArgs(None, in_place))
        self.times |= dict(step_secs=wall, in_place_secs=in_place_secs)

    def _timed(self, args: v1.train.SessionRunArgs | None) -> Generator:
        """Yields args for some seconds; returns the seconds of a step by three clocks: of time, of this process's work
        and of all processes' work (0.0 if unknown)."""

        def clocks():
            return np.array([time.perf_counter(), time.process_time(), host.busy_core_secs() or 0.0])

        for _ in range(_WARM_UP_STEPS):
            yield args
        start, steps = clocks(), 0
        while not steps or time.perf_counter() - start[0] < self._seconds:
            yield args
            steps += 1
        return ((clocks() - start) / steps).tolist()


def inputs_of(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the tensors that bring a step its examples, or those of the next step; it waits for none that is fed."""
    operations = graph.get_operations()
    ahead = [tensor for op in operations if op.name.endswith(transfer.NEXT) for tensor in op.outputs]
    if ahead:
        return [reader.outputs[0] for tensor in ahead for reader in tensor.consumers()]
    return [tensor for op in operations if op.type == "IteratorGetNext" for tensor in op.outputs]


class _LogLines(io.StringIO):
    """Notes the moments of a run's log lines."""

    def __init__(self):
        super().__init__()
        self.moments: list[np.ndarray] = []

    def write(self, text):
        if ", loss = " in text:
            self.moments.append(_moment())
        return len(text)


def _moment() -> np.ndarray:
    """Returns the time, and the main thread's processor time; seconds."""
    return np.array([time.perf_counter(), time.thread_time()])


def python_times() -> dict[str, list[float]]:
    """Returns [seconds, seconds of the main thread's processor time] for a step of a toy network in a run, with a log
    line every 500 steps, and for the same step called as a bare callable.

    Most of the processor time is Python's: kernels run in other threads.
    """
    toy, steps = tower_train.Workload("toy", _toy_examples, _toy_network), _TOY_STEPS * _TOY_ROUNDS
    options = dict(device="cpu", dtype="float32", batch_size=8, summary_every_steps=0, max_steps=steps)
    lines, moments = _LogLines(), []
    _train(toy, [], lines, log_every_steps=_TOY_STEPS, **options)
    config = toy.config(**options)
    placed = devices.place(config)
    built = training.training_graph(toy, _toy_examples(DataRequest("train")), config, placed)
    with built.graph.as_default(), v1.Session(config=placed.session_config) as session:
        for start in (v1.global_variables_initializer(), v1.local_variables_initializer(), built.stream.initializer):
            session.run(start)
        one_step = session.make_callable(built.report)
        for number in range(steps):
            one_step()
            if number % _TOY_STEPS == 0:
                moments.append(_moment())

    def of_a_step(moments: list[np.ndarray]) -> list[float]:
        return (np.median(np.diff(moments, axis=0), axis=0) / _TOY_STEPS).tolist()

    return {"in a run": of_a_step(lines.moments), "as a bare callable": of_a_step(moments)}


def _toy_examples(request: DataRequest) -> tower_train.Examples:
    features = np.random.default_rng(0).normal(size=[96, 4]).astype(np.float32)
    return tower_train.Examples.from_arrays("toy", features, np.arange(96) % 3, ("one", "two", "three"))


def _toy_network(features: tf.Tensor, training: bool) -> tf.Tensor:
    del training
    return features @ v1.get_variable("weights", [4, 3], features.dtype)
