"""What programs have of a run's steps: functions after each, and the loop over them."""

import gc
import json
import threading
import weakref

import jobs

from tower_train import Config, train, training_steps


def test_functions_get_each_step_and_the_records_of_log_lines_and_evaluations_and_may_end_the_run(toy_run, tmp_path):
    seen, logged, evaluated = [], [], []

    def after_step(step, report):
        seen.append((step, float(report.loss), int(report.examples)))
        return step == 20

    config = Config(**jobs.TOY | dict(train_dir=str(tmp_path), max_steps=40, eval_every_steps=10))
    result = train("toy_workload", config, after_step=after_step, on_log=logged.append, on_evaluate=evaluated.append)
    assert (result.step, result.stopped_by) == (20, "the program")
    assert [(step, examples) for step, _, examples in seen] == [(step, 16 * step) for step in range(1, 21)]
    losses = {record["step"]: record["loss"] for record in jobs.metrics(toy_run)[:4]}
    assert {step: loss for step, loss, _ in seen if step % 5 == 0} == losses
    assert {record["step"]: record["loss"] for record in logged} == losses
    assert [record["step"] for record in evaluated] == [10, 20]
    assert {type(value) for record in logged + evaluated for value in record.values()} == {int, float}
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(written, key=str) == sorted(logged + evaluated, key=str)
    jobs.assert_identical(jobs.variables(tmp_path, 20), jobs.variables(toy_run, 20))


def test_a_program_has_the_loop_over_the_steps_and_leaves_it_early(toy_run, tmp_path, capsys):
    config = Config(**jobs.TOY | dict(train_dir=str(tmp_path), max_steps=20))
    for number, report in enumerate(training_steps("toy_workload", config), start=1):
        assert report.step == number
        if number == 3:
            break
    assert jobs.saved_steps(tmp_path) == [3]
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == "the program"
    assert "Stopped by the program at step 3 of 20" in capsys.readouterr().out
    assert [report.step for report in training_steps("toy_workload", config)] == list(range(4, 21))
    assert jobs.read_json(tmp_path, "result.json")["stopped_by"] == "last step"
    assert "Done at step 20 of 20" in capsys.readouterr().out
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


def test_trainings_in_threads_are_as_one_alone_and_leave_no_graph_behind(tmp_path, monkeypatch):
    """Of a network with custom gradients, whose functions TensorFlow keeps."""
    begun, results = jobs.begun(monkeypatch), []

    def train_it(name):
        options = dict(workload="norm_workload", max_steps=3, num_gpus=2, batch_size=8)
        results.append(jobs.train_small(tmp_path / name, **options).step)

    train_it("alone")
    threads = [threading.Thread(target=train_it, args=[name]) for name in ("one", "other")]
    for function in (threading.Thread.start, threading.Thread.join):
        list(map(function, threads))
    assert results == [3, 3, 3]
    for name in ("one", "other"):
        jobs.assert_identical(jobs.variables(tmp_path / name), jobs.variables(tmp_path / "alone"))
    graphs = [weakref.ref(each.graph.graph) for each in begun]
    begun.clear()
    for _ in range(2):  # what has a finaliser goes the second time
        gc.collect()
    assert [graph() for graph in graphs] == [None] * 3
