"""The sides of each form of the benchmark."""

import pytest

from tower_train import errors
from tower_train.bench import sides
from tower_train.bench.sides import BenchmarkOptions, Side

ABOUT = {"gpus": [], "flops_per_example": 1e6}
RIVALS = [Side("port", "port:train", is_quick=True), Side("port/2 towers", "port:train", num_devices=2)]


def names(about=ABOUT, **options):
    [chosen] = sides.parts(BenchmarkOptions(**options), about, RIVALS).values()
    return [side.name for side in chosen]


def test_everything_that_the_benchmark_promises_is_there():
    trainers = [
        f"tower_train/{towers}/{dtype}"
        for dtype in ("float32", "bfloat16")
        for towers in ("1 tower", "2 towers", "4 towers", "8 towers")
    ]
    ceilings = ["ceiling/float32 matrix product", "ceiling/bfloat16 matrix product"]
    assert names() == ["port", "port/2 towers", *trainers, *ceilings]
    assert names(ABOUT | {"flops_per_example": None}) == ["port", "port/2 towers", *trainers]


def test_patterns_choose_sides():
    assert names(systems="port,tower_train/2*") == [
        "port", "tower_train/2 towers/float32", "tower_train/2 towers/bfloat16",
    ]  # fmt: skip
    assert names(systems="*/2*/float16,ceiling/float16*", towers=(1, 2)) == [
        "tower_train/2 towers/float16", "ceiling/float16 matrix product",
    ]  # fmt: skip


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_what_there_is():
    with pytest.raises(errors.ConfigError, match="--systems=horovod.*port, port/2 towers, tower_train/1 tower"):
        names(systems="horovod")


def test_a_sweep_is_over_batch_size_and_towers():
    parts = sides.parts(BenchmarkOptions(sweep=True), ABOUT, RIVALS)
    assert list(parts) == ["Batch size, 1 tower", "Towers, 128 examples a step"]
    sizes, towers = parts.values()
    assert [side.batch_size for side in sizes] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert [side.arguments["towers"] for side in towers] == [1, 2, 4, 8, 16]
    assert len({side.name for part in parts.values() for side in part}) == 13


def test_with_gpus_there_are_only_sides_that_have_a_gpu_for_each_tower():
    one_gpu = names(ABOUT | {"gpus": ["A"]})
    assert "tower_train/1 tower/float32" in one_gpu
    assert not [name for name in one_gpu if "towers" in name]
    with pytest.raises(errors.ConfigError, match="matches no side that this machine has the devices for"):
        names(ABOUT | {"gpus": ["A"]}, systems="*2 towers*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=12), "--batch_size=12 cannot be shared out evenly among 8 towers"),
        (dict(sweep=True, breakdown=True), "--sweep and --breakdown exclude each other"),
        (dict(quick=True, systems="port"), "--quick and --systems exclude each other"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        BenchmarkOptions(**options)
