"""--seeds: one run after the other, resumed where it was interrupted; mean, deviation and band."""

import re
import signal

import jobs
import numpy as np
import pytest
from PIL import Image

from tower_train import __main__, errors
from tower_train.inference import curves
from tower_train.run import seeds

OPTIONS = dict(workload="toy_workload", max_steps=6, batch_size=8, eval_every_steps=3, eval_at_end=True)
OPTIONS |= dict(ema=0.0, check_data=False)
WORDS = ["tower_train", *jobs.flags(log_every_steps=1, summary_every_steps=0, **OPTIONS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds") / "runs"
    assert __main__.main([*WORDS, f"--train_dir={folder}", "--seeds=3,11"]) == 0
    return folder


def evaluations(folder):
    return [jobs.read_json(folder / f"seed-{seed}", "result.json")["evaluation"]["metrics"] for seed in (3, 11)]


def test_each_seed_is_the_run_that_it_is_alone(folder, tmp_path):
    __main__.main([*WORDS, f"--train_dir={tmp_path / 'alone'}", "--seed=11"])
    jobs.assert_identical(jobs.variables(folder / "seed-11", 6), jobs.variables(tmp_path / "alone", 6))
    assert len({str(each) for each in evaluations(folder)}) == 2


def test_the_same_command_tells_mean_and_deviation_again(folder, capsys):
    capsys.readouterr()
    assert __main__.main([*WORDS, f"--train_dir={folder}", "--seeds=3,11"]) == 0
    told = capsys.readouterr().out
    assert told.count("Step 6 was reached before; nothing to do.") == 2
    values = np.array([each["loss"]["mean"] for each in evaluations(folder)])
    mean, deviation = values.mean(), values.std(ddof=1)
    line = f"loss = {mean:.4g} (deviation {deviation:.2g}; of each {', '.join(f'{value:.4g}' for value in values)})"
    assert line in told and "2 seeds, 50 examples of toy test" in told


def test_a_result_that_is_not_finite_is_unknown():
    results = [
        {"evaluation": {"num_examples": 9, "data": "x", "metrics": {"loss": {"mean": mean}}}} for mean in (1, None, 3)
    ]
    assert seeds.lines(results)[1].startswith("loss = 2 (deviation 1.4;") and "1, unknown, 3" in seeds.lines(results)[1]


def test_an_interrupted_command_goes_on_with_the_seed_that_it_was_at_as_its_line_says(tmp_path):
    words = [*WORDS[1:], "--max_steps=1000000", "--eval_every_steps=0", "--seeds=3,11"]
    with jobs.Program("tower_train", *words, f"--train_dir={tmp_path}/runs") as program:
        program.wait_until(lambda: (tmp_path / "runs/seed-3/metrics.jsonl").exists())
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait() == 130
        [again] = re.findall("Resume:   the same command with (--train_dir=.*)", program.output())
    assert not (tmp_path / "runs/seed-11").exists()
    assert (
        __main__.main(["tower_train", *words, again, f"--max_steps={jobs.saved_step(tmp_path / 'runs/seed-3')}"]) == 0
    )
    assert (tmp_path / "runs/seed-11/result.json").exists()


def test_curves_of_seeds_are_their_mean_in_a_band_from_the_lowest_to_the_highest(folder, tmp_path):
    pytest.importorskip("matplotlib")
    figure = curves.draw_curves(str(folder), str(folder / "seed-3"))
    losses = np.array([curves.history(str(folder / f"seed-{seed}"))["val_loss"] for seed in (3, 11)])
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["runs, 2 seeds, test"], losses.mean(axis=0))
    bands = [np.ptp(band.get_paths()[0].vertices[:, 1]) for band in figure.axes[0].collections]
    assert len(bands) == 2, "of the training's loss and of the evaluations'"
    low, high = losses.min(axis=0), losses.max(axis=0)
    assert bands[1] == pytest.approx(max(high) - min(low))
    assert any(re.match(r"runs, 2 seeds +step +6$", line) for line in curves.table([str(folder)]))
    curves.save(figure, str(tmp_path / "figure"))
    assert Image.open(tmp_path / "figure.png").size[0] > 500


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--seeds=1,1"], "names a seed twice"),
        (["--seeds=1,2", "--seed=1"], "--seed and --seeds exclude each other"),
        (["--seeds=1,-2"], "--seeds=1,-2: it must be whole numbers"),
        (["--seeds=1,2", "--worker_hosts=localhost:1111,localhost:2222", "--task_index=0"], "is for one process"),
    ],
)
def test_seeds_that_cannot_be_are_refused(words, reason, tmp_path):
    with pytest.raises(errors.ConfigError, match=reason):
        __main__.main([*WORDS, f"--train_dir={tmp_path}/runs", *words])


def test_a_run_is_no_folder_of_seeds(folder):
    with pytest.raises(errors.ConfigError, match="seed-3 is a run itself"):
        __main__.main([*WORDS, f"--train_dir={folder}/seed-3", "--seeds=1,2"])
