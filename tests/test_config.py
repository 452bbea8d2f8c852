"""Options refuse what cannot be, in words that say what can."""

import dataclasses
import pathlib

import numpy as np
import pytest

import cifar10
from tower_train import config
from tower_train.bench import sides as benchmark
from tower_train.config import Config, EvaluateOptions, ExportOptions, PredictOptions
from tower_train.errors import ConfigError
from tower_train.options import DATA, Options, as_text, option, option_type, parse, without_useless
from tower_train.workloads import image_folder, template

TWO_HOSTS = dict(worker_hosts="a:1,b:2", task_index=0)
WITH_OPTIONS = (benchmark, cifar10, config, image_folder, template)  # modules


def subclasses(cls):
    return [found for child in cls.__subclasses__() for found in (child, *subclasses(child))]


def every_option():
    """(class, field) of all options classes in those modules."""
    names = {module.__name__ for module in WITH_OPTIONS}
    classes = {cls.__qualname__: cls for cls in subclasses(Options) if cls.__module__ in names}
    return [(cls, field) for _, cls in sorted(classes.items()) for field in dataclasses.fields(cls)]


def refusal(**options):
    with pytest.raises(ConfigError) as error:
        Config(**options)
    return str(error.value)


WHOLE, LIST = "a whole number at least", "whole numbers separated by commas, each at least 0"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("num_gpus", 0, f"{WHOLE} 1 and at most 1024"),
        ("save_every_steps", 2**63, f"{WHOLE} 0"),
        ("accumulate_steps", 1025, f"{WHOLE} 1 and at most 1024"),
        ("gpus", (0, -1), LIST),
        ("gpus", (), LIST),
        ("device", "tpu", "one of auto, gpu, cpu"),
        ("epochs", 0, "a number above 0"),
        ("momentum", 1, "a number at least 0 and below 1"),
        ("learning_rate", float("nan"), "a number above 0"),
        ("learning_rate", float("inf"), "a number above 0"),
        ("learning_rate", np.float32("inf"), "a number above 0"),
        ("batch_size", "64", WHOLE),
        ("batch_size", 64.0, WHOLE),
        ("batch_size", True, WHOLE),
        ("seed", None, WHOLE),
        ("learning_rate", True, "a number"),
        ("learning_rate", 10**400, "a number"),
        ("override", 1, "true or false"),
        ("optimizer", 3, "one of sgd"),
        ("gpus", ("0",), LIST),
        ("gpus", (0.5,), LIST),
        ("gpus", (True,), LIST),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(name, value, allowed):
    assert (message := refusal(**{name: value})).startswith(f"--{name}=") and f": it must be {allowed}" in message


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("num_gpus", 1, 1),
        ("gpus", (0,), (0,)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("ema", 0.0, 0.0),
        ("learning_rate", 1e-30, 1e-30),
        ("learning_rate", 1, 1.0),
        ("accumulate_steps", 1024, 1024),
        ("gpus", [2, 0], (2, 0)),
        ("batch_size", np.int64(64), 64),
        ("learning_rate", np.float32(0.5), 0.5),
        ("gpus", [np.int32(1)], (1,)),
        ("train_dir", pathlib.Path("runs") / "one", "runs/one"),
        ("train_dir", "/mnt/gs:/run", "/mnt/gs:/run"),
    ],
)
def test_bounds_and_values_of_a_near_type_are_taken(name, value, kept):
    found = getattr(Config(**{name: value}), name)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": (1, 1)}, ["--gpus=1,1"]),
        ({"gpus": (0, 1), "num_gpus": 3}, ["--num_gpus=3", "--gpus=0,1"]),
        ({"gpus": (0, 1), "device": "cpu"}, ["--gpus=0,1", "--device=cpu"]),
        ({"all_reduce": "add_n", "variable_update": "cpu"}, ["--all_reduce=add_n", "--variable_update=auto or"]),
        *(({"profile_steps": steps}, ["--profile_steps=", "10,20"]) for steps in ((5, 3), (10,), (1, 2, 3))),
        *(
            ({"check_towers": text}, [f"--check_towers={text}", "auto, never, or a number from 2 to 64"])
            for text in ("1", "65", "some")
        ),
        ({"worker_hosts": "a:1,b:2"}, ["--worker_hosts=a:1,b:2", "--task_index"]),
        ({"worker_hosts": "a:1,b:2", "task_index": 2}, ["--worker_hosts=a:1,b:2", "--task_index=2"]),
        ({"worker_hosts": "a:1,b", "task_index": 0}, ["--worker_hosts=a:1,b", "host:port"]),
        ({"worker_hosts": "a:1,a:1", "task_index": 0}, ["--worker_hosts=a:1,a:1", "twice"]),
        ({"wait_for_workers": True}, ["--wait_for_workers", "--train_dir"]),
        ({"elastic": "2:3"}, ["--elastic=2:3", "--train_dir"]),
        *(
            ({"elastic": text, "train_dir": "x"}, [f"--elastic={text}: it must be MIN:MAX"])
            for text in ("3", "0:2", "3:2", "1:2:3", "a:b")
        ),
        ({"elastic": "2:3", "train_dir": "x", **TWO_HOSTS}, ["--elastic=2:3: there are 2 workers"]),
        *(
            ({"lr_schedule": "points", "lr_points": text}, [f"--lr_points={text}: {part} must be SHARE:VALUE, "])
            for text, part in [
                ("0:1:2", "'0:1:2'"),
                ("0:one", "'0:one'"),
                ("0:1,0.5:1,0.5:2", "'0.5:2'"),
                ("0:1,1.01:2", "'1.01:2'"),
                ("0:1,1:-1", "'1:-1'"),
                ("0:nan", "'0:nan'"),
            ]
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(options, named):
    message = refusal(**options)
    assert all(word in message for word in named) and "\n" not in message


def test_an_elastic_cluster_has_the_batch_of_the_most_workers_whoever_is_there():
    hosts = dict(worker_hosts="a:1,b:2,c:3,d:4,e:5", task_index=1, train_dir="x", elastic="2:4", num_gpus=2)
    config = Config(**hosts, batch_size=8, accumulate_steps=3)
    assert (config.tower_batch, config.batches_per_step, config.global_batch) == (8, 24, 192)
    assert Config(**hosts, global_batch_size=64).tower_batch == 8
    assert "evenly among 4 workers x 2 towers. Choose a multiple of 8" in refusal(**hosts, global_batch_size=60)
    assert "evenly among 3 towers. Choose" in refusal(num_gpus=3, global_batch_size=64)


@pytest.mark.parametrize("path", ["gs://bucket/run", "file:///tmp/run", pathlib.Path("s3://a")])
def test_a_directory_that_is_in_no_file_system_is_refused(path):
    for options_class in (Config, EvaluateOptions, ExportOptions, PredictOptions):
        with pytest.raises(ConfigError, match=f"^--train_dir={path}: it must be a local or mounted folder"):
            options_class(train_dir=path)
    with pytest.raises(ConfigError, match=f"^--export_dir={path}: it must be a local or mounted folder"):
        ExportOptions(train_dir="runs/one", export_dir=path)


def test_the_last_step_and_those_with_a_checkpoint():
    """Of 100 examples, 30 a step: the fourth step ends an epoch. Evaluations need checkpoints too."""
    steps = [({}, 1000), ({"max_steps": 7}, 7), ({"epochs": 1.0}, 4), ({"epochs": 3.0}, 10), ({"epochs": 0.01}, 1)]
    for options, last in steps:
        assert Config(batch_size=15, num_gpus=2, **options).last_step(num_examples=100) == last, options
    for options, saved in (({}, [6, 12]), ({"eval_every_steps": 4}, [4, 6, 8, 12]), ({"save_every_steps": 0}, [])):
        config = Config(**{"save_every_steps": 6} | options)
        assert [step for step in range(1, 13) if config.is_saved(step)] == saved


def test_every_option_is_described_and_its_default_is_allowed():
    for owner, field in every_option():
        assert field.metadata["help"] and field.metadata["group"], field.name
        assert field.metadata["resume"] in ("same", "note", "free"), field.name
        assert option_type(field) in (bool, int, float, str, tuple), field.name
        if field.default is not None:
            assert parse(field, as_text(field.default)) == field.default
        names = {other.name for other in dataclasses.fields(owner)}
        assert names.issuperset(field.metadata["needs"][:1]), field.name


@dataclasses.dataclass(frozen=True)
class Tea(Options):
    kind: str = option("green", "which", DATA, allowed=("green", "black", "mint"), resume="same")
    milk: float = option(0.0, "milk in it", DATA, allowed="at least 0", needs=("kind", "black"))
    minutes: int = option(3, "how long", DATA, allowed="at least 1", needs=("kind", "green", "black"))
    sugar: bool = option(False, "with sugar", DATA)
    lumps: int = option(1, "lumps of it", DATA, allowed="at least 1", needs=("sugar",))
    cups: int | None = option(None, "how much", DATA, needs=("litres", None))
    litres: float | None = option(None, "how much", DATA, needs=("cups", None))


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        (Tea, dict(milk=0.5), "--milk=0.5 needs --kind=black. Give that too."),
        (Tea, dict(minutes=5, kind="mint"), "--minutes=5 needs --kind=green or black. Give that too."),
        (Tea, dict(lumps=2), "--lumps=2 needs --sugar. Give that too."),
        (Tea, dict(cups=4, litres=1), "--cups=4 and --litres=1 exclude each other. Give one of them."),
        (Config, dict(momentum=0.8), "--momentum=0.8 needs --optimizer=momentum or muon. Give that too."),
        (Config, dict(early_stopping_patience_epochs=2.0), "--early_stopping_patience_epochs=2 needs --eval_every"),
        (Config, dict(lr_schedule="piecewise"), "--lr_schedule=piecewise needs --lr_boundaries. Give that too."),
        (Config, dict(max_steps=5, epochs=2.5), "--max_steps=5 and --epochs=2.5 exclude each other. Give one of them."),
        (Config, dict(batch_size=4, global_batch_size=8), "--batch_size=4 and --global_batch_size=8 exclude each"),
    ],
)
def test_an_option_without_what_it_needs_is_refused(options, given, text):
    with pytest.raises(ConfigError) as error:
        options(**given)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (dict(kind="mint"), {"milk", "minutes"}),
        (dict(sugar=False), {"lumps"}),
        (dict(litres=2.0), {"cups"}),
        (dict(kind="black", sugar=True, litres=None), set()),
    ],
)
def test_what_a_recipe_has_of_no_use_beside_what_is_given_goes(given, gone):
    recipe = dict(kind="black", milk=0.5, minutes=5, sugar=True, lumps=2, cups=4)
    kept = without_useless(Tea, recipe, given)
    assert kept == {name: value for name, value in recipe.items() if name not in gone}
    assert without_useless(Tea, dict(litres=1.0), dict(cups=4)) == {}
