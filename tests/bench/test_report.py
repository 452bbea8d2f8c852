"""The sides of a benchmark, their ratios within a round, and the tables and figures that show them."""

import xml.etree.ElementTree as xml

import numpy as np
import pytest

from tower_train import errors
from tower_train.bench import measure, plots, sides
from tower_train.bench.measure import Figure, Result
from tower_train.bench.sides import BenchmarkOptions, Side

COMMON = {"gpus": [], "optimizer": "momentum"}
RIVALS = [
    Side("port", "port:train", is_quick=True, label="Published script"),
    Side("port/2 towers", "port:train", num_devices=2),
]


def names(common=COMMON, **options):
    [chosen] = sides.parts(BenchmarkOptions(**options), common, RIVALS).values()
    return [side.name for side in chosen]


def test_patterns_choose_sides():
    assert names(systems="port,tower_train/2*") == [
        "port",
        "tower_train/2 towers/float32",
        "tower_train/2 towers/bfloat16",
    ]


def test_towers_train_by_momentum_as_their_rivals_and_with_muon_in_sides_of_their_own():
    common = COMMON | {"optimizer": "muon"}
    [chosen] = sides.parts(BenchmarkOptions(systems="tower_train/1 tower/*"), common, RIVALS).values()
    optimizers = {side.name.removeprefix("tower_train/1 tower/"): side.arguments.get("optimizer") for side in chosen}
    alike = {dtype: "momentum" for dtype in ("float32", "bfloat16")}
    assert optimizers == alike | {f"{dtype}/Muon": None for dtype in alike}


def test_a_sweep_is_over_batch_size_and_towers():
    parts = sides.parts(BenchmarkOptions(sweep=True), COMMON, RIVALS)
    assert list(parts) == ["Batch size, 1 tower", "Towers, 128 examples a step"]
    sizes, towers = parts.values()
    assert [side.batch_size for side in sizes] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert [side.arguments["towers"] for side in towers] == [1, 2, 4, 8, 16]
    assert len({side.name for part in parts.values() for side in part}) == 13


def test_with_gpus_there_are_only_sides_that_have_a_gpu_for_each_tower():
    one_gpu = names(COMMON | {"gpus": ["A"]})
    assert "tower_train/1 tower/float32" in one_gpu
    assert not [name for name in one_gpu if "towers" in name]
    with pytest.raises(errors.ConfigError, match="matches no side that this machine has the devices for"):
        names(COMMON | {"gpus": ["A"]}, systems="*2 towers*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(systems="horovod"), "--systems=horovod.*port, port/2 towers, tower_train/1 tower"),
        (dict(batch_size=12), "--batch_size=12 cannot be shared out evenly among 8 towers"),
        (dict(sweep=True, breakdown=True), "--sweep and --breakdown exclude each other"),
        (dict(quick=True, systems="port"), "--quick and --systems exclude each other"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        names(**options)


def test_a_figure_shows_sides_by_name_and_a_panel_for_each_part(tmp_path):
    def texts(**options):
        parts = sides.parts(BenchmarkOptions(**options), COMMON, RIVALS)
        rows = {
            title: measure.compare([Result(side, {0: 1000.0, 1: 1050.0}) for side in chosen])
            for title, chosen in parts.items()
        }
        svg, png = plots.draw(rows, tmp_path / "figure")
        assert png.read_bytes().startswith(b"\x89PNG")
        return {"".join(element.itertext()).strip() for element in xml.parse(svg).iter() if element.tag[-5:] == "}text"}

    assert {"Published script", "tower_train, 8 towers, bfloat16", "1,025", "others"} < texts()
    found = texts(sweep=True, towers=(1, 2))
    assert {"Batch size, 1 tower", "Towers, 128 examples a step", "tower_train, batch 1024"} < found
    assert "others" not in found


def result(name, rates):
    return Result(Side(name, "module:train"), dict(enumerate(rates)))


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds():
    """The machine gets ten times slower meanwhile: a ratio of medians would say something else."""
    base, other = [100.0, 50.0, 10.0], [110.0, 120.0, 20.0]
    first, second = measure.compare([result("port", base), result("other", other)])
    assert second.ratio == Figure(np.median(np.divide(other, base)), 1.1, 2.4) and second.ratio.median == 2.0
    assert second.rate == Figure(110.0, 20.0, 120.0)
    assert first.ratio == Figure(1.0, 1.0, 1.0)
