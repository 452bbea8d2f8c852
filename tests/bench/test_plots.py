"""The contents of the figure, read from its SVG, in which letters are letters."""

import xml.etree.ElementTree as xml

import pytest

from tower_train.bench import plots, results, sides
from tower_train.bench.results import Result
from tower_train.bench.sides import BenchmarkOptions, Side

ABOUT = {"gpus": [], "flops_per_example": 1e6}
RIVALS = [Side("port", "port:train", is_quick=True, label="Published script")]


def rows_of(**options):
    parts = sides.parts(BenchmarkOptions(**options), ABOUT, RIVALS)
    return {title: results.compare([Result(side, {0: 1000.0, 1: 1050.0}) for side in chosen])
            for title, chosen in parts.items()}  # fmt: skip


def texts(parts, tmp_path):
    """The lines of text of the figure."""
    pytest.importorskip("matplotlib")
    svg, png = plots.draw(parts, tmp_path / "figure")
    assert png.read_bytes().startswith(b"\x89PNG")
    return {"".join(element.itertext()).strip() for element in xml.parse(svg).iter() if element.tag.endswith("}text")}


def test_a_comparison_has_sides_by_name_and_what_its_lines_mean(tmp_path):
    found = texts(rows_of(), tmp_path)
    assert {"Published script", "tower_train, 8 towers, bfloat16", "1,025"} < found
    assert "others" in found and "ceiling: matrix products alone" in found


def test_a_sweep_has_a_panel_for_each_part(tmp_path):
    found = texts(rows_of(sweep=True, towers=(1, 2)), tmp_path)
    assert {"Batch size, 1 tower", "Towers, 128 examples a step", "tower_train, batch 1024"} < found
    assert not found & {"others", "ceiling: matrix products alone"}
