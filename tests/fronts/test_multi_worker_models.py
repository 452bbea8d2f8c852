"""A model of multi_gpu_model trains on all workers of a cluster as on one device, and names a worker that fails it."""

import json
import re

import clusters
import jobs
import numpy as np
import pytest
from keras_examples import EXAMPLES

ROUNDING = 1e-9


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Over two workers, what worker_program printed; the second is killed at the end."""

    def train(folder):
        with clusters.programs(2, str(jobs.TESTS / "fronts" / "worker_program.py"), str(folder)) as workers:
            statuses = [worker.process.wait(4 * jobs.WAIT_SECS) for worker in workers]
            outputs = [worker.output() for worker in workers]
        assert statuses == [138, -9], outputs
        (folder / "outputs.json").write_text(json.dumps(outputs))

    return json.loads((jobs.once(tmp_path_factory, "two workers", train) / "outputs.json").read_text())


@pytest.fixture(scope="module")
def reports(outputs):
    """Over two workers, what it reported, in its order."""
    return [[json.loads(line) for line in output.splitlines() if line[:1] == "{"] for output in outputs]


def named(reports, name):
    return [next(report for report in own if report.get("name") == name) for own in reports]


def test_workers_equal_keras_and_each_other_to_the_bit(reports):
    """Sparse gradients, added losses, weighted examples, batch normalisation, dropout and a start from a backup as
    Keras on one device; 12 steps, every third with a batch of one."""
    chief, other = named(reports, "trained")
    assert chief["weights differ by"] < ROUNDING and chief["history differs by"] < ROUNDING
    assert (other["weights"], other["history"]) == (chief["weights"], chief["history"])
    assert other["steps"] == chief["steps"] == 12


def test_two_workers_train_the_examples_of_keras_as_keras_does_on_one_device(reports):
    chiefs, others = ({report["example"]: report for report in own if "example" in report} for own in reports)
    assert chiefs.keys() == {name for name, each in EXAMPLES.items() if each.on_workers}
    assert max(report["difference"] for report in chiefs.values()) < ROUNDING, chiefs
    assert [report["weights"] for report in others.values()] == [report["weights"] for report in chiefs.values()]


def test_calls_for_one_batch_begin_with_the_chiefs_values_and_do_what_numpy_does(reports):
    chief, other = named(reports, "on batch")
    np.testing.assert_allclose(chief["weights"], chief["expected"], rtol=0, atol=ROUNDING)
    for found, expected in (chief["losses"], chief["seen"], other["seen"]):
        assert found == pytest.approx(expected, abs=ROUNDING)
    assert other["weights"] == chief["weights"]
    assert all(each["checked"].startswith("towers:   4 equal 1 on this network to ") for each in (chief, other))


def test_the_chief_alone_writes_and_prints(reports, outputs):
    chiefs, others = ([report["files"] for report in own if "files" in report] for own in reports)
    assert chiefs == [sorted([*(f"{epoch}.keras" for epoch in range(1, 5)), "backup", "log.csv"])] and others == [[]]
    shown = ["Epoch 1/2" in output for output in outputs]
    assert shown == [True, False] and "Epoch 3/4" in outputs[0] and "Epoch 2/4" not in outputs[0]


def test_workers_that_differ_are_refused_in_one_line_and_go_on_together(reports):
    chiefs, others = ([report["refused"] for report in own if "refused" in report] for own in reports)
    batch_size, batch, unseeded, one_image, validation = chiefs
    assert "the chief in batch 1 of training in epoch 3: the number of examples is 9, the chief's 8." in batch_size
    assert "its place is batch 4 of training in epoch 3, the chief's batch 1 of training in epoch 4." in batch
    assert "the examples' checksum is " in unseeded and "shuffle(1000, seed=1)" in unseeded
    assert re.search("in batch 1 of training in epoch .*: the examples' checksum is .*, the chief's ", one_image)
    assert re.search("in batch 1 of evaluation: the examples' checksum is .*, the chief's ", validation)
    for text in chiefs:
        assert text.startswith("worker 1 (localhost:") and "Start all workers with the same program and data." in text
    assert others == chiefs
    chief, other = named(reports, "evaluated")
    assert chief == other and chief["found"]["classes_accuracy"] == pytest.approx(chief["accuracy"])


def test_a_worker_that_dies_is_named_by_the_other(outputs):
    [line] = [line for line in outputs[0].splitlines() if line.startswith("tower_train: error: ")]
    assert "worker 1 (localhost:" in line and "is missing" in line
