"""Users' SessionRunHooks: what they fetch, feed and ask for, as in a MonitoredSession. Steps are the same without."""

import gc
import json
import threading
import time
import weakref

import jobs
import pytest
import tensorflow as tf

from tower_train import Config, train, training_steps

v1 = tf.compat.v1


class Feeding(v1.train.SessionRunHook):
    """Feeds its number and fetches it back, with a trace of each second step."""

    def __init__(self):
        self.seen, self.traced, self._steps = [], [], 0

    def begin(self):
        self.number = v1.placeholder_with_default(0, [])
        self.doubled = 2 * self.number

    def after_create_session(self, session, coord):
        self.before = session.run(self.doubled)

    def before_run(self, run_context):
        self._steps += 1
        level = v1.RunOptions.FULL_TRACE if self._steps % 2 == 0 else v1.RunOptions.NO_TRACE
        fetches = {"doubled": self.doubled, "step": v1.train.get_global_step()}
        return v1.train.SessionRunArgs(fetches, {self.number: self._steps}, v1.RunOptions(trace_level=level))

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results["doubled"])
        self.traced.append(bool(run_values.run_metadata.step_stats.dev_stats))
        assert run_context.session.run(v1.train.get_global_step()) == self._steps


def test_a_hook_fetches_feeds_and_traces_and_the_steps_stay_the_same(toy_run, tmp_path):
    hook = Feeding()
    jobs.train_toy(tmp_path, [hook], max_steps=4)
    assert hook.before == 0 and hook.seen == [2, 4, 6, 8]
    assert hook.traced == [False, True, False, True]
    jobs.train_toy(tmp_path, [jobs.At({})], max_steps=40)
    jobs.assert_identical(jobs.variables(tmp_path, 40), jobs.variables(toy_run, 40))


def test_functions_get_each_step_and_the_records_of_log_lines_and_evaluations_and_may_end_the_run(toy_run, tmp_path):
    seen, logged, evaluated = [], [], []

    def after_step(step, report):
        seen.append((step, float(report.loss), int(report.examples)))
        return step == 20

    config = Config(**jobs.TOY | dict(train_dir=str(tmp_path), max_steps=40, eval_every_steps=10))
    result = train("toy_workload", config, after_step=after_step, on_log=logged.append, on_evaluate=evaluated.append)
    assert (result.step, result.stopped_by) == (20, "a session hook")
    assert [(step, examples) for step, _, examples in seen] == [(step, 16 * step) for step in range(1, 21)]
    losses = {record["step"]: record["loss"] for record in jobs.metrics(toy_run)[:4]}
    assert {step: loss for step, loss, _ in seen if step % 5 == 0} == losses
    assert {record["step"]: record["loss"] for record in logged} == losses
    assert [record["step"] for record in evaluated] == [10, 20]
    assert {type(value) for record in logged + evaluated for value in record.values()} == {int, float}
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(written, key=str) == sorted(logged + evaluated, key=str)
    jobs.assert_identical(jobs.variables(tmp_path, 20), jobs.variables(toy_run, 20))


def test_a_tensor_that_two_hooks_feed_is_refused(tmp_path):
    first = Feeding()

    class Second(Feeding):
        def begin(self):
            self.number, self.doubled = first.number, first.doubled

    with pytest.raises(RuntimeError, match="two session hooks feed the same tensor: Tensor"):
        jobs.train_toy(tmp_path, [first, Second()], max_steps=2)


class Waiting(v1.train.SessionRunHook):
    """Asks to stop through the coordinator, after so many steps."""

    def __init__(self, steps):
        self._steps, self.coord, self.thread = steps, None, None

    def after_create_session(self, session, coord):
        self.coord = coord
        self.thread = threading.Thread(target=lambda: coord.wait_for_stop() and time.sleep(0.5))
        self.thread.start()
        coord.register_thread(self.thread)
        self._ask()

    def after_run(self, run_context, run_values):
        self._steps -= 1
        self._ask()

    def _ask(self):
        if self._steps == 0:
            self.coord.request_stop()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_hook_may_stop_by_the_coordinator_even_before_the_first_step(steps, tmp_path):
    hook = Waiting(steps)
    result = jobs.train_toy(tmp_path, [hook], max_steps=8)
    assert (result.step, result.stopped_by) == (steps, "a session hook")
    assert not hook.thread.is_alive()


@pytest.mark.parametrize("steps", [3, 20])
def test_a_program_has_the_loop_over_the_steps_and_leaves_it_early(steps, toy_run, tmp_path, capsys):
    """The run is saved, as at a signal, and goes on from there."""
    config = Config(**jobs.TOY | dict(train_dir=str(tmp_path), max_steps=20))
    for number, report in enumerate(training_steps("toy_workload", config), start=1):  # noqa: B007
        assert report.step == number
        if number == steps:
            break
    assert jobs.saved_steps(tmp_path) == [steps]
    stopped_by = "the program" if steps < 20 else "last step"
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == stopped_by
    ended = "Stopped by the program" if steps < 20 else "Done"
    assert f"{ended} at step {steps} of 20" in capsys.readouterr().out
    if steps < 20:
        assert len(list(training_steps("toy_workload", config))) == 20 - steps
    jobs.assert_identical(jobs.variables(tmp_path, 20), jobs.variables(toy_run, 20))


PROGRAM = """
import tower_train

steps = tower_train.training_steps("toy_workload", tower_train.Config(**{}))
for _ in range(7):
    next(steps)
"""


def test_a_program_that_ends_between_two_steps_leaves_a_saved_run(tmp_path):
    options = jobs.TOY | dict(train_dir=str(tmp_path), max_steps=20)
    with jobs.Program("-c", PROGRAM.format(options)) as program:
        assert program.process.wait(jobs.WAIT_SECS) == 0, program.output()
        assert "Stopped by the program at step 7 of 20" in program.output()
        assert "Exception ignored" not in program.output() and program.output().splitlines()[-1].startswith("     or:")
    assert jobs.saved_steps(tmp_path)[-1] == 7 and jobs.read_json(tmp_path, "result.json")["step"] == 7


def test_trainings_in_threads_are_as_one_alone_and_leave_no_graph_behind(tmp_path):
    """Of a network with custom gradients, whose functions TensorFlow keeps."""
    graphs, results = [], []

    def train_it(name):
        hook = jobs.At({1: lambda context: graphs.append(weakref.ref(context.session.graph))})
        results.append(jobs.train_toy(tmp_path / name, [hook], "norm_workload", max_steps=5).step)

    train_it("alone")
    threads = [threading.Thread(target=train_it, args=[name]) for name in ("one", "other")]
    for function in (threading.Thread.start, threading.Thread.join):
        list(map(function, threads))
    assert results == [5, 5, 5]
    for name in ("one", "other"):
        jobs.assert_identical(jobs.variables(tmp_path / name), jobs.variables(tmp_path / "alone"))
    for _ in range(2):  # what has a finaliser goes the second time
        gc.collect()
    assert [graph() for graph in graphs] == [None] * 3
