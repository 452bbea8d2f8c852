"""The sweep, on processes that answer as they are told to."""

import importlib.util
import json

import pytest

from tower_train.bench import forms, measure, progress, report, results
from tower_train.bench.systems import BenchmarkOptions

MACHINE = {"processor": "abacus", "cores": 2, "memory_bytes": 2**30, "versions": {"python": "3"}}
ABOUT = {"gpus": [], "data": "images", "notice": None}


@pytest.fixture
def session(fake_workers, tmp_path):
    """(options, steps_per_sec) -> a Session with fake processes."""

    def make(options, steps_per_sec):
        workers = fake_workers(steps_per_sec=steps_per_sec)
        return measure.Session(options, tmp_path, MACHINE, ABOUT, workers.start, progress.Progress())

    return make


def rows(lines, heading):
    """{first cell: the others} of the table whose first column is headed so."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading}"))
    table = lines[start + 2 : lines.index("", start)]
    return {first: rest for first, *rest in ([c.strip() for c in line.strip("|").split("|")] for line in table)}


def test_a_sweep_shows_what_each_size_is_worth(session, tmp_path):
    """A step takes 10 ms and 1 ms more for every 8 examples; towers cost nothing and a long run is 3 % slower."""

    def steps_per_sec(name, number):
        batch = int(name.rpartition(" ")[2]) if "batch" in name else 8 if "step" in name else 128
        return (0.97 if "10000" in name else 1.0) / (0.010 + 0.001 * batch / 8)

    lines = forms.sweep(session(BenchmarkOptions(sweep=True, rounds=2, seconds=1.0), steps_per_sec))
    sizes = rows(lines, "batch size")
    assert sizes["8"] == ["727", "+/- 0", "1.00", "-", "500 MiB"]
    assert sizes["1,024"] == ["7420", "+/- 0", "10.20", "-", "500 MiB"]
    assert {towers: row[2] for towers, row in rows(lines, "towers").items()} == dict.fromkeys(
        ["1", "2", "4", "8", "16"], "1.00"
    )
    assert {step: row[2] for step, row in rows(lines, "step").items()} == {
        "100": "1.00", "1,000": "1.00", "10,000": "0.97"
    }  # fmt: skip
    sides = json.loads((tmp_path / "sweep.json").read_text())["sides"]
    assert {len(side["samples"]) for side in sides} == {2}
    assert sides[-1]["side"]["settings"]["warm_up_steps"] == 10_000
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert report.sweep(results.read(tmp_path / "sweep.json")) == lines[:-2]
