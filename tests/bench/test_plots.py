"""The contents of the figures, read from their SVG, in which letters are letters."""

import re
import xml.etree.ElementTree as xml

import pytest

from tower_train import errors
from tower_train.bench import plots, results, systems
from tower_train.bench.results import Measured, Results
from tower_train.bench.systems import BenchmarkOptions

MACHINE = {"processor": "abacus", "cores": 2, "memory_bytes": 2**30, "versions": {"python": "3", "keras": "4"}}
ABOUT = {
    "gpus": [], "data": "digits (in /home)", "flops_per_example": 1e6, "reference": "port", "rivals": [
        {"name": "port", "num_devices": 1, "num_processes": 1, "dtype": "float32", "forms": ["full", "quick"],
         "label": "Published script"}
    ],
}  # fmt: skip


def results_of(options, rate=lambda side: 1000.0, noise=(1.0, 1.05), about=ABOUT, **more):
    """Of a comparison by these options, from rates in examples/sec."""
    sides = systems.comparison(options, about)
    measured = []
    for number, side in enumerate(sides):
        per_sec = rate(side) * (about["flops_per_example"] if side.is_ceiling else 1)
        samples = [{"round": i, "per_sec": per_sec * (factor if number % 2 else 1.0)} for i, factor in enumerate(noise)]
        measured.append(Measured(side, samples=samples))
    return Results(options, MACHINE, about, "2026-01-31 12:00", measured, about["reference"], **more)


def drawn(found, tmp_path):
    """The lines of text of the figure, and all its text in one."""
    pytest.importorskip("matplotlib")
    svg, png = plots.draw(found, tmp_path / "figure")
    assert png.read_bytes().startswith(b"\x89PNG")
    texts = ["".join(element.itertext()).strip() for element in xml.parse(svg).iter() if element.tag.endswith("}text")]
    return texts, " ".join(texts)


def test_a_comparison_has_systems_by_name_machine_date_and_what_its_lines_mean(tmp_path):
    texts, text = drawn(results_of(BenchmarkOptions(), lambda side: 500.0 if side.is_ceiling else 1000.0), tmp_path)
    assert {"Published script", "tower_train, 8 towers, real data", "tower_train, 1 tower, fixed batch"} < set(texts)
    assert {"Training in float32", "Training in bfloat16", "Scaling over towers"} < set(texts)
    assert "abacus, 2 cores, no GPU, 1 GiB; digits; python 3, keras 4; 2026-01-31 12:00." in text
    assert "The ceiling is the rate if" in text and "1.0 MFLOP an example" in text
    assert "Bars go beyond it where" in text
    assert "perfect scaling: the towers share the same 2 cores" in text
    assert not re.search(r"\w/(fixed|real|float32|tower)", text)


def test_what_is_not_in_a_figure_is_not_explained(tmp_path):
    """Two tower counts are no curve, one bar of an arithmetic no panel, and no bar is beyond its ceiling."""
    texts, text = drawn(results_of(BenchmarkOptions(quick=True)), tmp_path)
    assert {"Training", "tower_train, 1 tower, real data, bfloat16"} < set(texts)
    assert "The ceiling is" in text
    assert not re.search("Bars go beyond|caling|Training in", text)


def test_a_sweep_has_a_title_on_each_panel_and_none_with_two_points(tmp_path):
    options = BenchmarkOptions(sweep=True, towers=(1, 2))
    found = results_of(BenchmarkOptions(towers=(1, 2, 4, 8)))
    names = [one.side.name for one in found.measured if one.side.kind == "trainer"]
    parts = [
        {
            "axis": "batch size",
            "title": "Batch size, 1 tower",
            "points": {"8": names[0], "16": names[1], "32": names[2]},
        },
        {"axis": "towers", "title": "Towers", "points": {"1": names[0], "2": names[1]}},
    ]
    for kept in (["Batch size, 1 tower"], ["Batch size, 1 tower", "Towers"]):
        texts, text = drawn(Results(options, MACHINE, ABOUT, "2026", found.measured, parts=parts), tmp_path)
        assert [text for text in texts if text in ("Batch size, 1 tower", "Towers")] == kept
        assert ("perfect scaling" in text) == ("Towers" in kept)
        parts[1]["points"]["4"] = names[2]


@pytest.mark.parametrize("quick", [False, True])
def test_results_that_are_too_noisy_are_not_drawn(tmp_path, quick):
    found = results_of(BenchmarkOptions(quick=quick), noise=(1.0, 2.0, 3.0))
    assert results.too_noisy(found.rows())
    assert plots.draw(found, tmp_path / "figure") == []


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(errors.ConfigError, match="nowhere/figure.svg cannot be written .* --redraw=FILE"):
        plots.draw(results_of(BenchmarkOptions(quick=True)), tmp_path / "nowhere" / "figure")


def test_without_matplotlib_there_is_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert plots.draw(results_of(BenchmarkOptions()), tmp_path / "figure") == []


def test_perfect_scaling_needs_a_device_for_each_tower():
    by_towers = {2: 100.0, 4: 120.0, 8: 90.0}
    assert plots.perfect_scaling(by_towers, on_gpus=True) == [100.0, 200.0, 400.0]
    assert plots.perfect_scaling(by_towers, on_gpus=False) == [100.0, 100.0, 100.0]
