"""The breakdown of a step: the trainer's own steps, first timed and then traced, in this process."""

import contextlib
import dataclasses
import io
import re
import statistics
import tempfile
import time

import tensorflow as tf
from tensorflow.python.client import timeline

import tower_train
from tower_train import host
from tower_train.bench import attribution, report, results, sides
from tower_train.bench.attribution import Breakdown, Operation
from tower_train.bench.systems import BenchmarkOptions
from tower_train.graph import transfer

v1 = tf.compat.v1

_WARM_UP_STEPS, _TRACED_STEPS = 10, 5
_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv")  # run from the start of a step until their input comes
_OP_TYPE = re.compile(r" = (\w+)\(")


def run(options: BenchmarkOptions) -> list[str]:
    """Divides a step of each tower count into breakdown.json and Chrome trace files; returns the lines to print."""
    out = results.directory(options.out)
    breakdowns, written = [], [out / "breakdown.json"]
    for towers in options.tower_counts:
        breakdown, trace, data = measure(options, towers)
        breakdowns.append(breakdown)
        written.append(out / f"trace-{towers}.json")
        written[-1].write_text(timeline.Timeline(trace.step_stats).generate_chrome_trace_format(show_dataflow=False))
    measured_on = {"options": dataclasses.asdict(options), "machine": host.describe()}
    results.write(written[0], measured_on | {"breakdowns": [dataclasses.asdict(one) for one in breakdowns]})
    return [
        f"Where the time of a step of {options.batch_size} examples goes. Data: {data}", "",
        *attribution.table(breakdowns), "",
        attribution.sentence(breakdowns[0], breakdowns[-1]), "",
        *report.written(written),
        "The traces open in chrome://tracing and in https://ui.perfetto.dev.",
    ]  # fmt: skip


def measure(options: BenchmarkOptions, towers: int) -> tuple[Breakdown, v1.RunMetadata, str]:
    """Trains with so many towers for a moment; returns the breakdown, its last step's trace, and a line on the data."""
    workload = sides.workload_of(options.workload, options.model)
    tracer = _Tracer(options.seconds_each)
    with tempfile.TemporaryDirectory(prefix="tower_train-") as train_dir, contextlib.redirect_stdout(io.StringIO()):
        config = workload.config(
            dataset=options.dataset, data_dir=options.data_dir, device=options.device, num_gpus=towers,
            batch_size=options.batch_size // towers, train_dir=train_dir, max_steps=10**12, summary_every_steps=0,
            save_every_steps=0, eval_at_end=False,
        )  # fmt: skip
        result = tower_train.train(workload, config, [tracer])
    steps = [operations_of(trace) for trace in tracer.traces]
    each = [attribution.seconds_by_category(operations) for operations in steps]
    late = [attribution.lateness(operations) for operations in steps]
    breakdown = Breakdown(
        towers=towers,
        on_gpus=any("GPU" in operation.device for operation in steps[0]),
        step_secs=tracer.step_secs,
        cores=host.cores(),
        busy=tracer.busy,
        own=tracer.own,
        seconds={name: statistics.fmean(one.get(name, 0.0) for one in each) for name in sorted(set().union(*each))},
        late_tower=statistics.mode(tower for tower, _ in late),
        late_secs=statistics.fmean(secs for _, secs in late),
        in_place_secs=tracer.in_place_secs,
    )
    return breakdown, tracer.traces[-1], f"{result.data}. {result.notice}" if result.notice else result.data


def operations_of(trace: v1.RunMetadata) -> list[Operation]:
    """Returns the operations of a traced step.

    A GPU's kernels are in a device '.../GPU:0/stream:all', named 'operation:type'; those in '.../GPU:0' only launch
    them.
    """
    devices = {device.device: device.node_stats for device in trace.step_stats.dev_stats}
    found = []
    for device, nodes in devices.items():
        if f"{device}/stream:all" in devices or ("/stream:" in device and not device.endswith("/stream:all")):
            continue
        for node in nodes:
            op_type = _OP_TYPE.search(node.timeline_label)
            if op_type and op_type[1] in _TRANSFERS or node.node_name == "_SOURCE":
                continue
            start = (node.all_start_micros + node.op_start_rel_micros) / 1e6
            end = (node.all_start_micros + node.op_end_rel_micros) / 1e6
            found.append(Operation(node.node_name.partition(":")[0], device, start, max(start, end)))
    return found


class _Tracer(v1.train.SessionRunHook):
    """Warms up, times steps for some seconds, traces a few, times steps with input in place, and asks for the end.

    Its `step_secs`, `own`, `busy` and `in_place_secs` are those of a Breakdown.
    """

    def __init__(self, seconds: float):
        self.step_secs = self.own = self.busy = self.in_place_secs = 0.0
        self.traces: list[v1.RunMetadata] = []
        self._seconds, self._steps, self._start = seconds, 0, _clocks()
        self._inputs, self._given = [], None

    def after_create_session(self, session, coord):
        self._inputs = inputs_of(session.graph)

    def before_run(self, run_context):
        if self._given:
            return v1.train.SessionRunArgs(None, self._given)
        if len(self.traces) > _TRACED_STEPS:
            return v1.train.SessionRunArgs(self._inputs)
        if self.step_secs:
            return v1.train.SessionRunArgs(None, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))
        return None

    def after_run(self, run_context, run_values):
        self._steps += 1
        if self._given:
            if self._steps <= _WARM_UP_STEPS:
                self._start = _clocks()
            elif time.perf_counter() - self._start[0] >= self._seconds:
                self.in_place_secs = (time.perf_counter() - self._start[0]) / (self._steps - _WARM_UP_STEPS)
                run_context.request_stop()
        elif len(self.traces) > _TRACED_STEPS:
            del self.traces[0]  # which also sets tracing up
            self._given, self._steps = dict(zip(self._inputs, run_values.results, strict=True)), 0
        elif self.step_secs:
            self.traces.append(run_values.run_metadata)
        elif self._steps <= _WARM_UP_STEPS:
            self._start = _clocks()
        elif time.perf_counter() - self._start[0] >= self._seconds:
            wall, own, busy = (now - start for now, start in zip(_clocks(), self._start, strict=True))
            self.step_secs = wall / (self._steps - _WARM_UP_STEPS)
            self.own = own / (wall * host.cores())
            self.busy = max(self.own, min(1.0, busy / (wall * host.cores())))


def inputs_of(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the tensors that bring a step its examples, or those of the next step; it waits for none that is fed."""
    operations = graph.get_operations()
    ahead = [tensor for op in operations if op.name.endswith(transfer.NEXT) for tensor in op.outputs]
    if ahead:
        return [reader.outputs[0] for tensor in ahead for reader in tensor.consumers()]
    return [tensor for op in operations if op.type == "IteratorGetNext" for tensor in op.outputs]


def _clocks() -> tuple[float, float, float]:
    """Returns seconds of time, of this process's work and of all processes' work (0.0 if unknown)."""
    return time.perf_counter(), time.process_time(), host.busy_core_secs() or 0.0
