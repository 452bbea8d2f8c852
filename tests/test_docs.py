"""README.md and docs/: their programs train, their links and the paths that they name are there."""

import json
import re
import types

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import Config, EvaluateOptions, Workload, evaluate_run, train

PAGES = {path.name: path.read_text() for path in [jobs.ROOT / "README.md", *sorted((jobs.ROOT / "docs").glob("*.md"))]}
WAYS = {"arrays": "Examples.from_arrays", "by index": "arrays.fetcher", "TFRecord": "tf_records", "tf.data": "tf_data"}
CONFIG = dict(num_gpus=2, batch_size=16, optimizer="adam", learning_rate=0.01, summary_every_steps=0)


def module(page, marker):
    """A page's only example that holds the marker, as a module."""
    [source] = [block for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL) if marker in block]
    found = types.ModuleType("example")
    exec(source, found.__dict__)
    return found


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
        rows = [f"{x},{y},{label}\n" for (x, y), label in zip(points, labels, strict=True)]
        (tmp_path / f"{split}.csv").write_text("".join(rows))
        for part in range(2):
            with tf.io.TFRecordWriter(f"{split}-{part}.tfrecord") as writer:
                for point, label in zip(points[part::2], labels[part::2], strict=True):
                    example = tf.train.Example()
                    example.features.feature["point"].float_list.value.extend(point)
                    example.features.feature["label"].int64_list.value.append(label)
                    writer.write(example.SerializeToString())


@pytest.mark.parametrize("marker", WAYS.values(), ids=WAYS)
def test_examples_of_own_data_train_resume_and_are_evaluated(marker, files, tmp_path):
    workload = Workload(
        "spirals", module("workloads.md", marker).examples, module("workloads.md", "def inference").inference
    )
    for name, steps in (("whole", [30]), ("resumed", [13, 30])):
        for max_steps in steps:
            train(workload, Config(train_dir=str(tmp_path / name), max_steps=max_steps, **CONFIG))
    whole, resumed = [
        {name: value for name, value in jobs.variables(tmp_path / run).items() if not name.startswith("iterator")}
        for run in ("whole", "resumed")
    ]
    jobs.assert_identical(resumed, whole)
    [found] = evaluate_run(EvaluateOptions(train_dir=str(tmp_path / "whole")), workload)
    assert found.num_examples == (3000 if marker == "Examples.from_arrays" else 300)
    assert found.metrics["precision @ 1"].mean > 0.4


def test_the_readmes_program_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workload = module("README.md", "keras_network").WORKLOAD
    found = train(workload, workload.config(num_gpus=2, max_steps=150, eval_at_end=True, summary_every_steps=0))
    result = json.loads((tmp_path / found.train_dir / "result.json").read_text())
    assert result["evaluation"]["metrics"]["precision @ 1"]["mean"] > 0.8


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 150


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = jobs.ROOT if page == "README.md" else jobs.ROOT / "docs"
    for target, anchor in re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        path = folder / target if target else folder / page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path.read_text()), (target, anchor)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_a_page_begins_with_all_its_contents(page):
    contents, *rest = re.split(r"^(?=## )", PAGES[page], flags=re.MULTILINE)
    assert re.findall(r"\]\(#([^)]*)\)", contents) == anchors("".join(rest))
    assert len(rest) > 1


@pytest.mark.parametrize("page", PAGES)
def test_paths_are_there(page):
    for name in re.findall(r"(?<![\w/.])(?:scripts|tests|cifar10|tower_train)/[\w./]+(?!\*)", PAGES[page]):
        assert list(jobs.ROOT.glob(name.rstrip("."))), name


def test_every_page_is_listed_in_the_readme():
    listed = re.findall(r"^\| \[.*?\]\(docs/(.*?)\)", PAGES["README.md"], re.MULTILINE)
    assert sorted(listed) == sorted(PAGES.keys() - {"README.md"})
