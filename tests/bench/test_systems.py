"""The sides of each form of the benchmark."""

import pytest

from tower_train import errors
from tower_train.bench import systems
from tower_train.bench.systems import BenchmarkOptions

ABOUT = {
    "gpus": [],
    "reference": "port",
    "rivals": [
        {"name": "port", "num_devices": 1, "num_processes": 1, "dtype": "float32", "forms": ["quick", "full"]},
        {"name": "port/2 towers", "num_devices": 2, "num_processes": 1, "dtype": "float32", "forms": ["full"]},
    ],
}


def names(about=ABOUT, **options):
    return [side.name for side in systems.comparison(BenchmarkOptions(**options), about)]


def test_everything_that_the_benchmark_promises_is_there():
    sides = systems.comparison(BenchmarkOptions(batch_size=64), ABOUT)
    assert {side.batch_size for side in sides if not side.is_ceiling} == {64}
    there = [side.name for side in sides]
    for towers in ("1 tower", "2 towers", "4 towers", "8 towers"):
        for dtype in ("float32", "bfloat16"):
            for inputs in ("fixed", "real"):
                assert f"tower_train/{towers}/{dtype}/{inputs}" in there
    assert {"port", "port/2 towers", "ceiling/float32 matrix product", "ceiling/bfloat16 matrix product"} < set(there)
    assert len(there) == len(set(there))


def test_a_quick_benchmark_has_the_most_telling_sides():
    assert names(quick=True) == [
        "port",
        "tower_train/1 tower/float32/fixed",
        "tower_train/1 tower/float32/real",
        "tower_train/2 towers/float32/real",
        "tower_train/1 tower/bfloat16/real",
        "ceiling/float32 matrix product",
        "ceiling/bfloat16 matrix product",
    ]


def test_patterns_choose_sides():
    assert names(systems="port,tower_train/2*/real") == [
        "port", "tower_train/2 towers/float32/real", "tower_train/2 towers/bfloat16/real",
    ]  # fmt: skip
    assert names(systems="*/2*/float16/real,ceiling/float16*", towers=(1, 2)) == [
        "tower_train/2 towers/float16/real", "ceiling/float16 matrix product",
    ]  # fmt: skip


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_what_there_is():
    with pytest.raises(errors.ConfigError, match="--systems=horovod.*port, port/2 towers, tower_train/1 tower"):
        names(systems="horovod")


GROWING = ABOUT | {
    "rivals": [
        *ABOUT["rivals"],
        {"name": "strategy 2", "num_devices": 2, "num_processes": 1, "dtype": "float32", "forms": ["full", "growing"]},
        {"name": "strategy of workers", "num_devices": 1, "num_processes": 2, "dtype": "float32", "forms": ["growing"]},
    ]
}


def test_growing_has_copies_workers_and_what_does_the_same():
    sides = systems.comparison(BenchmarkOptions(growing=True), GROWING)
    assert [side.name for side in sides] == [
        "tower_train/2 towers/float32/real", "tower_train/2 towers/mirrored/collective",
        "tower_train/2 towers/mirrored/add_n", "tower_train/4 towers/float32/real",
        "tower_train/4 towers/mirrored/collective", "tower_train/4 towers/mirrored/add_n", "tower_train/2 workers",
        "strategy 2", "strategy of workers",
    ]  # fmt: skip
    assert [side.name for side in sides if side.is_anchor] == ["tower_train/2 towers/float32/real"]
    assert {side.batch_size for side in sides} == {128}


def test_what_only_growing_has_can_be_chosen_and_is_not_there_else():
    pattern = "tower_train/2 workers,*mirrored/add_n,strategy of*"
    chosen = names(GROWING, systems=pattern, towers=(1, 2))
    assert chosen == ["strategy of workers", "tower_train/2 towers/mirrored/add_n", "tower_train/2 workers"]
    assert not set(chosen) & set(names(GROWING)) and "strategy 2" in names(GROWING)


def test_processes_do_not_share_gpus():
    assert names(GROWING | {"gpus": ["A", "B"]}, growing=True)[-1] == "strategy 2"
    with pytest.raises(errors.ConfigError, match="--growing is about several towers, which this machine has no GPUs"):
        names(GROWING | {"gpus": ["A"]}, growing=True)


def test_with_gpus_there_are_only_sides_that_have_a_gpu_for_each_tower():
    one_gpu = names(ABOUT | {"gpus": ["A"]})
    assert "tower_train/1 tower/float32/real" in one_gpu
    assert not [name for name in one_gpu if "towers" in name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=12), "--batch_size=12 cannot be shared out evenly among 8 towers"),
        (dict(sweep=True, breakdown=True), "--sweep and --breakdown exclude each other"),
        (dict(growing=True, systems="port"), "--systems and --growing both choose"),
        (dict(quick=True, systems="port"), "--systems and --quick both choose"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        BenchmarkOptions(**options)
