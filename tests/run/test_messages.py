"""A person's view of a run: log lines in the original's form, true rates, and commands that work."""

import dataclasses
import io
import logging
import re
import shlex
import sys
import time
import types

import jobs
import pytest
import toy_workload

from tower_train import console, evaluate
from tower_train.graph import transfer
from tower_train.inference import evaluator
from tower_train.run import messages, training

# The original's format: '%s: step %d, loss = %.2f (%.1f examples/sec; %.3f sec/batch)', with more digits below 1
LOG_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{6})?): step (?P<step>\d+), loss = (?P<loss>\d+\.\d{2,}) "
    r"\((?P<rate>\d+\.\d) examples/sec; (?P<seconds>\d+\.\d{3}) sec/batch(; input (?P<input>\d+) %)?\)"
)


def log_lines(output):
    return [match for match in map(LOG_LINE.fullmatch, output.splitlines()) if match]


def test_log_lines_have_the_originals_form_and_agree_with_metrics_jsonl(cifar10_run):
    directory, process = cifar10_run
    records, lines = jobs.metrics(directory), log_lines(process.stdout)
    assert [int(line["step"]) for line in lines] == [record["step"] for record in records] == [4, 8, 12, 16, 20, 24]
    for line, record in zip(lines, records, strict=True):
        assert line["loss"] == f"{record['loss']:.2f}"
        assert line["rate"] == f"{record['examples_per_sec']:.1f}"
        assert line["seconds"] == f"{record['sec_per_batch']:.3f}"
        assert record["examples"] == record["step"] * 10
        assert record["epoch"] == record["examples"] / 200
        # A tower batch is 5 examples.
        assert record["examples_per_sec"] * record["sec_per_batch"] == pytest.approx(5)
    training_secs = sum(4 * 10 / record["examples_per_sec"] for record in records)
    assert 0 < training_secs < jobs.read_json(directory, "result.json")["seconds"]


def test_a_run_of_one_step_tells_no_rate_but_a_batch_of_more_examples_than_there_are(tmp_path, capsys):
    result = jobs.train_small(tmp_path / "small", max_steps=1, batch_size=48, num_gpus=2)
    assert result.examples_per_sec is None
    told = capsys.readouterr().out
    assert re.search(r"Done at step 1 of 1 after \d+\.\d s: loss \d\.\d+\.\n", told) and "***" not in told
    jobs.train_small(tmp_path / "large", max_steps=1, batch_size=49, num_gpus=2)
    assert "*** A step takes 98 examples, and there are 96: some come several" in capsys.readouterr().out


def test_a_run_closes_with_its_result_and_commands_that_work(cifar10_run):
    directory, process = cifar10_run
    assert process.stderr == ""
    result = jobs.read_json(directory, "result.json")
    closing = process.stdout.splitlines()[-6:]
    assert closing[0] == (
        f"Done at step 24 of 24 after {result['seconds']:.1f} s: loss {result['loss']:.2f}, "
        f"{result['examples_per_sec']:.1f} examples/sec."
    )
    assert closing[1] == f"Saved:    {directory}/model.ckpt-24"
    precision = result["evaluation"]["metrics"]["precision @ 1"]
    assert closing[2] == (
        f"Result:   precision @ 1 = {precision['mean']:.3f} (95 % interval {precision['low']:.3f} to "
        f"{precision['high']:.3f}) on test examples at step 24, after {result['training_secs']:.1f} s of training"
    )
    commands = dict(line.strip().split(":", 1) for line in closing[3:])
    assert shlex.split(commands["Curves"])[1:] == ["-m", "tower_train.curves", f"{directory}"]
    assert shlex.split(commands["or"])[1:] == ["-m", "tensorboard.main", f"--logdir={directory}"]
    evaluated = jobs.printed_command(commands["Evaluate"], directory.parent)
    assert evaluated.returncode == 0, evaluated.stderr
    # The last evaluation during training was of the same checkpoint.
    during = re.findall(r"^(?:step 24: |precision).*", process.stdout, re.MULTILINE)[-3:]
    assert re.fullmatch("step 24: 40 examples of CIFAR-10 test.*, moving averages", during[0])
    assert evaluated.stdout.splitlines()[:3] == during
    assert len(evaluated.stdout.splitlines()) == 4 + 2 + 10  # and the loss, and the confusion matrix


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (1234.5678, "1234.57"),
        (1, "1.00"),
        (0.0003941, "0.000394"),
        (3.94e-7, "3.94e-07"),
        (0, "0.00"),
        (-0.01234, "-0.0123"),
        (float("nan"), "nan"),
    ],
)
def test_a_small_loss_has_digits_that_count(loss, text):
    assert messages.as_loss(loss) == text
    assert f" loss = {text} (" in messages.step_line(10, loss, 1.0, 1.0)


def test_examples_per_sec_covers_the_steps_of_all_towers_since_the_last_line_and_no_evaluation(tmp_path, monkeypatch):
    """Of the first steps of a start too, also of a resumed one; by a clock that only steps and evaluations move."""
    clock, whole = types.SimpleNamespace(seconds=1000.0), evaluator.Evaluator.evaluate
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))

    secs, count = [], training.Training._count

    def counted(*args):
        clock.seconds += secs.pop(0)
        count(*args)

    def slow(*args):
        clock.seconds += 1000
        return whole(*args)

    monkeypatch.setattr(evaluator.Evaluator, "evaluate", slow)
    monkeypatch.setattr(training.Training, "_count", counted)
    secs += [0.5] * 2
    towers = dict(num_gpus=2, batch_size=8)
    jobs.train_small(tmp_path, max_steps=2, log_every_steps=4, **towers)
    # Two steps of 1/2 s; then two of 1/4 s, four of 1/2 s, six of 1 s, each of 16 examples.
    secs += [0.25] * 2 + [0.5] * 4 + [1.0] * 6
    result = jobs.train_small(tmp_path, max_steps=14, log_every_steps=4, eval_every_steps=6, **towers)
    assert clock.seconds >= 3000
    records = jobs.metrics(tmp_path)
    assert [record["examples_per_sec"] for record in records] == [32.0, 64.0, 32.0, 16.0, 16.0]
    assert [record["sec_per_batch"] for record in records] == [0.25, 0.125, 0.25, 0.5, 0.5]
    # The first step, which also prepares the graph, does not count: 11 steps in 1/4 + 2 + 6 seconds.
    assert result.examples_per_sec == pytest.approx(11 * 16 / 8.25)
    assert result.training_secs == pytest.approx(8.5)


def test_the_share_of_time_that_waits_for_input_is_told(tmp_path, capsys, monkeypatch):
    for is_staged in (False, True):
        monkeypatch.setattr(transfer, "are_gpus", lambda devices, is_staged=is_staged: is_staged)
        jobs.train_small(tmp_path / f"{is_staged}", workload="toy_workload:SLOW", max_steps=8, log_every_steps=2)
        printed = capsys.readouterr().out
        # the first batches came while the first step was prepared
        assert all(int(line["input"]) > 50 for line in log_lines(printed)[2:]), printed
        shares = [record["input_share"] for record in jobs.metrics(tmp_path / f"{is_staged}")]
        assert all(0.5 < share <= 1 for share in shares[2:])


def test_there_is_a_line_every_ten_steps_and_one_of_the_last_step_of_a_start(tmp_path, capsys):
    options = dict(log_every_steps=10, save_every_steps=0)
    for stop, expected in ((23, [10, 20, 23]), (6, [29])):
        jobs.train_small(tmp_path / "long", {stop: lambda: True}, max_steps=50, **options)
        assert [int(line["step"]) for line in log_lines(capsys.readouterr().out)] == expected
    assert [record["step"] for record in jobs.metrics(tmp_path / "long")] == [10, 20, 23, 29]
    result = jobs.train_small(tmp_path / "short", max_steps=6, eval_every_steps=3, **options)
    told = capsys.readouterr().out
    assert told.index(": step 6, loss") < told.index("step 6: "), "the step before its evaluation"
    assert (result.history["step"], result.history["val_step"]) == ([6], [3, 6])


def test_lines_go_through_a_logger_that_a_program_silences_or_redirects(tmp_path, capsys, monkeypatch):
    logger, file = logging.getLogger("tower_train"), tmp_path / "log"

    def redirect():
        logger.setLevel(logging.INFO)
        monkeypatch.setattr(logger, "handlers", [logging.FileHandler(file)])

    logger.setLevel(logging.WARNING)
    try:
        jobs.train_small(tmp_path / "run", {7: redirect}, max_steps=10)
    finally:
        logger.setLevel(logging.INFO)
    assert capsys.readouterr() == ("", "")
    assert [int(line["step"]) for line in log_lines(file.read_text())] == [10]


def test_on_a_terminal_there_are_log_lines_and_a_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    pause = lambda: time.sleep(0.02)  # noqa: E731 - the bar is drawn ten times a second
    jobs.train_small(tmp_path, dict.fromkeys(range(61), pause), max_steps=60)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stdout.getvalue())
    lines = "\n".join(line.strip() for line in re.split(r"[\r\n]+", plain))
    assert [int(line["step"]) for line in log_lines(lines)] == list(range(5, 61, 5))  # as asked for
    bars = [int(step) for step in re.findall(r"step (\d+)/60 ", plain)]
    assert bars == sorted(bars) and len(set(bars)) > 3
    assert "\u2501" in plain and "loss -" not in plain
    assert re.search(r"loss \d\.\d+ +\d+ examples/sec +\d:\d\d:\d\d left", plain)


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        ("mine.py", 'if __name__ == "__main__":', "mine:OWN"),
        ("mine.py", "", None),
        ("my-own.py", 'if __name__ == "__main__":', None),
    ],
)
def test_a_workload_of_the_running_program_is_named_where_that_can_be_imported(name, text, path, tmp_path, monkeypatch):
    main, own = sys.modules["__main__"], dataclasses.replace(toy_workload.WORKLOAD)
    (tmp_path / name).write_text(text)
    for attribute, value in (("OWN", own), ("__file__", str(tmp_path / name)), ("__spec__", None)):
        monkeypatch.setattr(main, attribute, value, raising=False)
    assert messages.import_path(own) == path
    monkeypatch.setattr(main, "MINE", toy_workload.WORKLOAD, raising=False)
    assert messages.import_path(toy_workload.WORKLOAD) == "toy_workload", "a module comes before the program"


PROGRAM = """
import toy_workload
import tower_train

OWN = tower_train.Workload("own", toy_workload.load, toy_workload.network)

if __name__ == "__main__":
    config = tower_train.Config(train_dir="runs/a b", max_steps=2, batch_size=8, check_data=False)
    tower_train.train(OWN, config)
"""


def test_the_printed_commands_work_after_a_program_too(tmp_path, monkeypatch, command):
    (tmp_path / "program.py").write_text(PROGRAM)
    trained = jobs.command("program.py", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert jobs.read_json(tmp_path / "runs" / "a b", "run.json")["config"]["workload"] == "program:OWN"
    commands = dict(line.split(": ", 1) for line in trained.stdout.splitlines()[-3:-1])
    _, *words = shlex.split(commands["Evaluate"])
    assert words[:2] == ["-m", evaluate.__name__]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    status, stdout, stderr = command(evaluate, *words[2:])
    assert status == 0 and "precision @ 1 = " in stdout, stderr
    assert "GPU" not in (trained.stdout + stdout).replace("(no GPU is used)", "")


def test_stdout_that_takes_nothing_raises_nothing(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            tried.append(text)
            raise OSError(28, "No space left on device")

    tried = []
    monkeypatch.setattr(sys, "stdout", Full())
    console.say("a line of a run")
    assert tried
