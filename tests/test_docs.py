"""README.md and docs/: their programs train, and the options, links and paths that they name are there."""

import dataclasses
import functools
import importlib
import re
import shlex
import types

import idx_files
import jobs
import keras
import numpy as np
import pytest
import sides
import tensorflow as tf
from PIL import Image

import tower_train
from cifar10 import Cifar10Options
from tower_train import Config, EvaluateOptions, Workload, __main__, config, estimator, evaluate_run, train
from tower_train.bench.sides import BenchmarkOptions
from tower_train.options import command_line
from tower_train.workloads import image_folder

PATHS = {path.name: path for folder in ("", "docs") for path in sorted((jobs.ROOT / folder).glob("*.md"))}
PAGES = {name: path.read_text() for name, path in PATHS.items()}
WAYS = {"by index": "arrays.fetcher", "TFRecord": "tf_records", "tf.data": "tf_data"}
CONFIG = dict(batch_size=32, optimizer="adam", learning_rate=0.01, summary_every_steps=0, check_towers="never")
OTHERS = set(  # of scripts and other programs
    "cases check count data_dir durations evaluator flagfile help logdir minutes no-kill recipe seed seeds steps "
    "tf_xla_deterministic_cluster_names tf_xla_persistent_cache_directory thorough trials workers".split()
)


def blocks(page):
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def is_whole(block):
    """Returns whether a piece is a program: it begins with a docstring."""
    return block.startswith('"""')


def module(page, marker):
    """A page's only piece that holds the marker, as a module."""
    [source] = [block for block in blocks(page) if marker in block]
    found = types.ModuleType("example")
    exec(source, found.__dict__)
    return found


def commands(page):
    """The lines of a page's commands, joined where they go on in the next, without their remarks."""
    lines = re.findall(r"^    ((?:python|scripts).*?[^\\])$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+#.*", "", line).replace("\\\n", " ") for line in lines]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """300 points of each split in every format that the examples read, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for seed, split in enumerate(("train", "test")):
        rng = np.random.default_rng(seed)
        labels = rng.integers(3, size=300)
        points = rng.normal(labels[:, np.newaxis], 1.0, [300, 2]).astype(np.float32)
        np.save(f"{split}-points.npy", points)
        np.save(f"{split}-labels.npy", labels)
        np.savetxt(f"{split}.csv", np.column_stack([points, labels]), "%g", ",")
        for part in range(2):
            with tf.io.TFRecordWriter(f"{split}-{part}.tfrecord") as writer:
                for point, label in zip(points[part::2], labels[part::2], strict=True):
                    example = tf.train.Example()
                    example.features.feature["point"].float_list.value.extend(point)
                    example.features.feature["label"].int64_list.value.append(label)
                    writer.write(example.SerializeToString())


@pytest.mark.parametrize("marker", WAYS.values(), ids=WAYS)
def test_examples_of_own_data_train_and_are_evaluated(marker, files, tmp_path):
    workload = Workload(
        "spirals", module("workloads.md", marker).examples, module("workloads.md", "def inference").inference
    )
    train(workload, Config(train_dir=str(tmp_path / "run"), max_steps=30, **CONFIG))
    [found] = evaluate_run(EvaluateOptions(train_dir=str(tmp_path / "run")), workload)
    assert found.num_examples == 300
    assert found.metrics["precision @ 1"].mean > 0.4


@pytest.fixture
def unchecked(monkeypatch):
    """No program's towers are compared: tests/fronts compares them."""
    plain = functools.partial(tower_train.multi_gpu_model, check_towers="never")
    monkeypatch.setattr(tower_train, "multi_gpu_model", plain)
    monkeypatch.setattr(estimator.RunConfig, "check_towers", "never")


def test_the_readmes_lines_train_a_keras_model(unchecked):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    [source] = [block for block in blocks("README.md") if not is_whole(block)]
    before = model.get_weights()
    exec(source, {"model": model, "x": np.ones([128, 3], np.float32), "y": np.ones([128, 1], np.float32)})
    assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("marker", ["multi_gpu_model", "tf_estimator"])
def test_a_program_to_migrate_to_runs(marker, unchecked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = [block for block in blocks("migration.md") if is_whole(block) and marker in block]
    exec(source, {})
    assert (tmp_path / {"multi_gpu_model": "my_model.keras", "tf_estimator": "runs/mine/checkpoint"}[marker]).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_every_piece_is_whole_or_says_that_it_is_a_part(page):
    for block in blocks(page):
        compile(block, page, "exec")
        assert is_whole(block) or block.startswith("# Part of "), block
    assert PAGES[page].count("```") == 2 * len(blocks(page)), "a piece of another language"


def few_layers(include_top=False, weights=None, input_shape=(32, 32, 3)):
    """In place of a network of keras.applications, of which a tower takes seconds to build."""
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Conv2D(4, 3, 2)(inputs))


@pytest.fixture
def places(tmp_path, monkeypatch, cifar10_dir):
    """The current directory, with what the pages' commands read; {workload: where its data is}."""
    (tmp_path / "spirals.py").write_text(next(filter(is_whole, blocks("README.md"))))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    few_layers.__module__ = keras.applications.EfficientNetB0.__module__
    monkeypatch.setattr(keras.applications, "EfficientNetB0", few_layers)
    few_layers().save_weights("efficientnetb0.weights.h5")
    rng = np.random.default_rng(0)
    folders = [f"OCT2017/{split}/{kind}" for split in ("train", "val", "test") for kind in ("CNV", "DME")]
    for name in [*(f"{folder}/{i}.jpeg" for folder in folders for i in (1, 2)), "cat.jpg", "dog.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, [32, 32, 3], np.uint8)).save(name)
    (tmp_path / "fashion").mkdir()
    idx_files.write(tmp_path / "fashion")
    return {"cifar10": cifar10_dir, "tower_train.workloads.fashion_mnist": "fashion"}


def smaller(words, places):
    """A command line of the trainer or the benchmark with a step, small batches and few systems; with two towers if the
    page gives several and no workload."""
    given = dict(re.findall(r"^--(\w+)=(.*)$", "\n".join(words), re.MULTILINE))
    if given.get("workload") == "spirals":
        return [*words, "--check_towers=never"]
    if words[0] == "tower_train":
        changed = {"max_steps": 1, "batch_size": 2, "epochs": None, "eval_at_end": False, "check_towers": "never"}
        changed |= {"summary_every_steps": 0} | (
            {"num_gpus": 1 if "workload" in given else 2} if "num_gpus" in given else {}
        )
        changed |= {"seeds": "0,1"} if "seeds" in given else {}
        changed |= {"image_size": 32} if "image_size" in given else {}
        changed |= {"log_every_steps": 1} | ({"eval_every_steps": 1} if "--keep_best" in words else {})
    elif words[0] == "cifar10.multi_gpu_train":
        changed = {"max_steps": 1, "batch_size": 2}
    elif words[0] == "tower_train.benchmark":
        changed = {"rounds": 1, "seconds": 0.05, "batch_size": 8, "out": "out", "quick": None, "towers": 1}
        changed |= {"systems": given.get("systems", "port").partition(",")[0].rstrip("*")}
    else:
        return words
    if "data_dir" not in given and (directory := places.get(given.get("workload", "cifar10"))):
        changed["data_dir"] = directory
    kept = [word for word in words if word.partition("=")[0].removeprefix("--") not in changed]
    return kept + jobs.flags(**{name: value for name, value in changed.items() if value is not None})


def kind(line):
    """Trainings are of a kind if they share the workload, with a network of Keras or none; other commands if equal."""
    workload = re.search(r"--workload=(\S+)", line)
    return (workload and workload[1], "--network" in line) if " -m tower_train " in line else line


def is_elsewhere(line):
    """Returns whether a command is for other machines or another program, or is a benchmark of a larger network:
    tests/cifar10/test_rivals.py trains the sides of those."""
    if " -m tower_train.benchmark" not in line:
        return re.search("--worker_hosts|PROGRAM", line)
    parsed = command_line.parse(shlex.split(line)[2:], BenchmarkOptions, "")
    return parsed.model or parsed.workload != "cifar10"


def test_commands_succeed_one_after_the_other(places, command):
    """But for scripts and old programs, which have tests of their own, and for those on other machines. All trainings
    are parsed. Those that write no train_dir run if they are the first of their kind; the README's program runs whole.
    """
    lines, done = dict.fromkeys(line for page in PAGES for line in commands(page)), set()
    for line in sorted(lines, key=lambda line: "--train_dir" not in line):
        program, *words = shlex.split(line)
        if program != "python":
            assert (jobs.ROOT / program).is_file(), line
            continue
        if words[1] == "tower_train":
            __main__.parse(words[1:])  # as it stands; it runs smaller
        words = smaller(words[1:], places)
        if not ({line if "--train_dir" in line else kind(line), tuple(words)} & done or is_elsewhere(line)):
            with sides.forking():
                module = importlib.import_module(words[0])
                status, stdout, stderr = command(__main__ if module is tower_train else module, *words[1:])
            assert status == 0, (line, stderr)
            assert "=spirals" not in line or float(re.search(r"precision @ 1 = ([\d.]+)", stdout)[1]) > 0.98
        done |= {kind(line), tuple(words)}


@pytest.mark.parametrize("page", PAGES)
def test_options_paths_and_links_are_there(page):
    classes = [Config, EvaluateOptions, config.ExportOptions, config.PredictOptions]
    classes += [BenchmarkOptions, image_folder.FolderOptions, Cifar10Options]
    known = {field.name for cls in classes for field in dataclasses.fields(cls)} | OTHERS
    for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", PAGES[page]):
        assert name in known or name.removeprefix("no") in known, name
    for name in re.findall(r"(?<![\w/.])(?:scripts|tests|cifar10|tower_train)/[\w./]+(?!\*)", PAGES[page]):
        assert (jobs.ROOT / name.rstrip(".")).exists(), name
    for target, anchor in re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        path = PATHS[page].parent / target if target else PATHS[page]
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path.read_text()), (target, anchor)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_lists_every_page():
    listed = re.findall(r"^\| \[.*?\]\(docs/(.*?)\)", PAGES["README.md"], re.MULTILINE)
    assert sorted(listed) == [name for name, path in PATHS.items() if path.parent != jobs.ROOT]
