"""Ctrl-C and kill end a run after the step under way, and it can go on from there."""

import os
import signal

import jobs
import pytest

from tower_train import Config, train
from tower_train.run import signals
from tower_train.run_dir import checkpoint


def test_a_signal_saves_the_step_under_way_and_the_run_goes_on_from_it(toy_run, tmp_path, capsys):
    send = {13: lambda: os.kill(os.getpid(), signal.SIGINT)}
    result = jobs.train_toy(tmp_path, send, max_steps=40, save_every_steps=0, summary_every_steps=10)
    assert (result.step, result.stopped_by, result.reason.exit_status) == (13, "SIGINT", 130)
    assert jobs.saved_steps(tmp_path) == [13] and jobs.read_json(tmp_path, "result.json")["stopped_by"] == "SIGINT"
    output = capsys.readouterr().out
    assert "Stopped by SIGINT at step 13 of 40" in output
    assert f"Resume:   the same command with --train_dir={tmp_path}" in output
    jobs.train_toy(tmp_path, max_steps=40, summary_every_steps=10)
    jobs.assert_identical(jobs.variables(tmp_path), jobs.variables(toy_run, 40))
    records = jobs.metrics_but_times(tmp_path)
    assert [record["step"] for record in records].count(13) == 1  # the first start's last step, beside every fifth
    assert [record for record in records if record["step"] != 13] == jobs.metrics_but_times(toy_run)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_save_the_step_under_way_too(number, status, tmp_path, capsys):
    before = signal.signal(number, signal.SIG_DFL)  # nohup may ignore it
    try:
        result = jobs.train_small(tmp_path, {3: lambda: os.kill(os.getpid(), number)}, max_steps=6, save_every_steps=0)
    finally:
        signal.signal(number, before)
    assert (result.step, result.stopped_by, result.reason.exit_status) == (3, number.name, status)
    assert jobs.saved_steps(tmp_path) == [3] and jobs.read_json(tmp_path, "result.json")["stopped_by"] == number.name
    assert f"Stopped by {number.name} at step 3 of 6" in capsys.readouterr().out


def test_a_signal_during_the_final_save_leaves_a_finished_run(tmp_path, monkeypatch):
    save = checkpoint.Checkpoints.save

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGHUP)
        return save(*args)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", interrupted)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may ignore it
    try:
        result = jobs.train_small(tmp_path, max_steps=4, save_every_steps=0)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.step, result.stopped_by, result.reason.exit_status) == (4, "last step", 0)
    assert jobs.saved_steps(tmp_path) == [4]


def test_a_signal_ends_the_last_evaluation_and_the_same_command_makes_up_for_it(tmp_path, capsys):
    config = Config(**jobs.SMALL | dict(train_dir=str(tmp_path), max_steps=5, eval_at_end=True))
    result = train("toy_workload", config, on_log=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (result.step, result.stopped_by, result.reason.exit_status) == (5, "SIGTERM", 143)
    output = capsys.readouterr().out
    assert "ckpt-5 was interrupted by SIGTERM.\nStopped by SIGTERM at step 5 of 5" in output
    assert "\nResume: " in output
    assert "evaluation" not in jobs.read_json(tmp_path, "result.json")
    for _ in range(2):
        assert train("toy_workload", config).reason.exit_status == 0
        assert jobs.read_json(tmp_path, "result.json")["evaluation"]["step"] == 5
    output = capsys.readouterr().out
    assert "nothing to do" in output and "\nResult:   precision @ 1 = " in output


def test_the_first_signal_counts_and_handlers_come_back_also_after_an_error():
    before = [signal.getsignal(number) for number in signals.STOPPING]
    received = signals.Received()
    with pytest.raises(ZeroDivisionError), received.handled():
        assert received.stopping is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert received.stopping is signal.SIGTERM
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


def test_a_handler_of_a_program_in_c_stays_as_python_could_not_bring_it_back(monkeypatch):
    getsignal, before = signal.getsignal, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number is signal.SIGTERM else getsignal(number))
    with signals.Received().handled():
        assert getsignal(signal.SIGTERM) is before and getsignal(signal.SIGINT) is not before
    assert getsignal(signal.SIGTERM) is before


def test_a_second_interrupt_does_not_wait_for_the_save(tmp_path):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="Left at once"):
        jobs.train_small(tmp_path, {13: twice}, max_steps=40, save_every_steps=10)
    assert jobs.saved_steps(tmp_path) == [10]
