"""python -m tower_train: a mistake is one line that says what to do, and a workload of one's own trains by its name."""

import io
import os
import signal
import sys

import jobs
import pytest

from cifar10 import generated
from tower_train import Config, EvaluateOptions, __main__, console, errors, evaluate_run, train
from tower_train.options import command_line
from tower_train.run import signals
from tower_train.run import train as running


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("--gpus=7", ["--gpus=7", "this machine's GPUs are: none"]),
        ("--device=gpu", ["this machine's GPUs are: none", "--device=cpu"]),
        ("--dataset=mnist", ["--dataset=mnist", "cifar10", "generated"]),
        ("--data_dir=/no/such/directory", ["--data_dir=/no/such/directory", "data_batch_1.bin"]),
        ("--dataset=generated --data_dir=s3://bucket", ["s3://bucket: ", "a local or mounted folder"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_leaves_nothing_behind(word, parts, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(__main__, *word.split())
    assert all(part in line for part in parts)
    assert jobs.contents(tmp_path) == {}


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/run"])
def test_a_train_dir_that_cannot_be_written_to_is_one_line(place, refusal, cifar10_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    train_dir = tmp_path / place
    line = refusal(__main__, f"--train_dir={train_dir}", f"--data_dir={cifar10_dir}")
    assert f"--train_dir={train_dir} cannot be" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_drawn_images_are_told_apart_from_cifar10_and_stay_with_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generated, "IMAGES_PER_FILE", 20)
    options = dict(data_dir=str(tmp_path / "data"), batch_size=8, ema=0.0, train_dir=str(tmp_path / "run"))
    options |= dict(check_towers="never", check_data=False, summary_every_steps=0)
    result = train("cifar10", Config(dataset="generated", max_steps=1, **options))
    assert "NOT CIFAR-10" in result.notice
    assert jobs.read_json(tmp_path / "run", "result.json")["notice"] == result.notice
    assert capsys.readouterr().out.count(result.notice) == 2  # among the first lines and among the last
    # Neither a resume nor an evaluation needs to be told again which images they are.
    assert train("cifar10", Config(max_steps=2, **options)).step == 2
    [found] = evaluate_run(EvaluateOptions(train_dir=str(tmp_path / "run"), batch_size=8))
    assert found.num_examples == 20
    assert found.class_names == generated.CLASS_NAMES


def test_what_a_user_gives_cannot_break_the_line_that_names_it(refusal):
    assert r"--num_gpus=1\n2\x1b[31m: it must be" in refusal(__main__, "--num_gpus=1\n2\x1b[31m")
    assert r"--num_gpus=1\udcff: it must be" in refusal(__main__, "--num_gpus=1\udcff")


def test_lines_that_a_terminal_has_no_letters_for_are_printed_all_the_same(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console.say("run: caf\u00e9\udcff")
    assert written.getvalue() == b"run: caf\\xe9\\udcff\n"


@pytest.mark.parametrize(
    ("words", "signalled", "is_final", "is_started_again"),
    [
        ([], False, False, False),
        (["--wait_for_workers"], True, False, False),
        (["--wait_for_workers"], False, False, True),
        (["--elastic=2:3"], False, True, False),
        (["--elastic=2:3"], False, False, True),
    ],
)
def test_whoever_is_stuck_starts_again_if_it_is_to_wait_and_was_not_told_to_end(
    words, signalled, is_final, is_started_again, tmp_path, monkeypatch, capfd
):
    """The chief's first step waits for the second worker, which has agreed and is gone; a process of its own."""
    started_again = []
    monkeypatch.setattr(__main__, "start_again", started_again.append)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))

    def stuck(workload, config, user, workload_options, leave_at_once):
        received = signals.Received()
        if signalled:
            received.stopping = signal.SIGTERM
        error = errors.WorkerError("worker 1 is missing", is_final=is_final, environment={"REMEMBERED": "1"})
        leave_at_once(running._for_this_worker(error, received))

    monkeypatch.setattr(running, "start", stuck)
    with pytest.raises(SystemExit) as left:
        __main__.main(["tower_train", "--workload=toy_workload", f"--train_dir={tmp_path}", *words])
    assert left.value.code == (143 if signalled else 138)
    assert started_again == [{"REMEMBERED": "1"}] * is_started_again
    assert "worker 1 is missing" in capfd.readouterr().err


def test_ctrl_c_before_the_first_step_is_no_traceback(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        command_line.run(interrupted)
    assert left.value.code == 130
    assert capsys.readouterr().err.count("\n") == 1
