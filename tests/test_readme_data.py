"""The README's examples of own data train, resume and are evaluated."""

import re
import types

import jobs
import numpy as np
import pytest
import tensorflow as tf

from tower_train import Config, EvaluateOptions, Workload, evaluate_run, train

BLOCKS = re.findall(r"```python\n(.*?)```", (jobs.ROOT / "README.md").read_text(), re.DOTALL)
WAYS = {"arrays": "Examples.from_arrays", "by index": "arrays.fetcher", "TFRecord": "tf_records", "tf.data": "tf_data"}
CONFIG = dict(num_gpus=2, batch_size=16, optimizer="adam", learning_rate=0.01, summary_every_steps=0)


def module(marker):
    """The README's only example that holds the marker, as a module."""
    [source] = [block for block in BLOCKS if marker in block]
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
def test_the_readmes_example_trains_resumes_and_is_evaluated(marker, files, tmp_path):
    workload = Workload("spirals", module(marker).examples, module("def inference").inference)
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
