"""A run is resumed as what it was, and as nothing else."""

import dataclasses
import importlib
import json
import pathlib

import jobs
import numpy as np
import pytest
import toy_workload

from tower_train import errors
from tower_train.run_dir import manifest

OTHER_DATA = dataclasses.replace(
    toy_workload.WORKLOAD,
    examples=lambda request: dataclasses.replace(toy_workload.load(request), name="others", fingerprint="other"),
)


@pytest.mark.parametrize(
    ("options", "differences"),
    [
        (dict(workload=OTHER_DATA), ["data name was toy train, now others", "data fingerprint was"]),
        (dict(validation_fraction=0.1), ["run: --validation_fraction was 0.0, now 0.1; ", "data fingerprint was"]),
        (dict(optimizer="adam", num_gpus=4), ["--optimizer was momentum, now adam", "global batch was 16, now 32"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "+".join(value),
)
def test_another_run_is_refused_with_what_differs_and_nothing_is_touched(options, differences, run, capsys):
    before = jobs.contents(run)
    with pytest.raises(errors.RunError) as refusal:
        jobs.train_toy(run, max_steps=50, **options)
    message = str(refusal.value)
    assert message.startswith(f"--train_dir={run} holds another run: ")
    assert message.count(" was ") == len(differences)
    for difference in differences:
        assert difference in message
    assert "--override" in message and "\n" not in message
    assert jobs.contents(run) == before
    assert capsys.readouterr().out == ""


def test_override_goes_on_all_the_same_and_says_what_differs(run, capsys):
    options = dict(workload=OTHER_DATA, seed=1, batch_size=4)
    result = jobs.train_toy(run, max_steps=45, override=True, **options)
    output = capsys.readouterr().out
    assert result.step == 45
    assert "steps:    40 to 45" in output
    assert "Changed since the last start: " in output
    assert [record["step"] for record in jobs.metrics(run)] == list(range(5, 46, 5))
    assert jobs.metrics(run)[-1]["examples"] == jobs.variables(run)["examples_seen"] == 40 * 16 + 5 * 8
    # The run is now what it was overridden to be.
    jobs.train_toy(run, max_steps=46, **options)


def test_override_does_not_mix_variables_of_another_type(run):
    before = jobs.contents(run)
    with pytest.raises(errors.RunError, match="does not fit this network: .*float64.*, .* Give another --train_dir.$"):
        jobs.train_toy(run, max_steps=45, override=True, dtype="float64")
    assert jobs.contents(run) == before


def test_another_learning_rate_is_allowed_and_noted(run, capsys):
    run_json = jobs.read_json(run, "run.json")
    del run_json["config"]["weight_decay"]  # as a version without the option left it
    (run / "run.json").write_text(json.dumps(run_json))
    jobs.train_toy(run, max_steps=50, learning_rate=0.02, weight_decay=0.1)
    changed, printed = "Changed since the last start: --", capsys.readouterr().out
    assert f"{changed}weight_decay was not given, now 0.1.\n{changed}learning_rate was 0.01, now 0.02." in printed
    rates = [record["learning_rate"] for record in jobs.metrics(run)]
    np.testing.assert_allclose(rates, [0.01] * 8 + [0.02] * 2, rtol=1e-12)


def test_a_checkpoint_without_run_json_is_refused_unless_overridden(run):
    (run / "run.json").unlink()
    before = jobs.contents(run)
    with pytest.raises(errors.RunError, match=f"{run} holds .*model.ckpt-40 but no run.json"):
        jobs.train_toy(run, max_steps=45)
    assert jobs.contents(run) == before
    assert jobs.train_toy(run, max_steps=45, override=True).step == 45


def test_metrics_without_run_json_are_not_written_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of another program")
    with pytest.raises(errors.RunError, match=r"metrics.jsonl but no run.json.*--override to replace that file"):
        jobs.train_toy(tmp_path, max_steps=1)
    assert jobs.contents(tmp_path) == {tmp_path / "metrics.jsonl": b"of another program"}


def test_run_json_names_the_data_from_any_directory_and_other_workloads_are_refused_before_theirs_are_fetched(
    tmp_path, monkeypatch
):
    """A workload of one's own may read a remote store."""
    monkeypatch.chdir(tmp_path)
    for steps, (given, kept) in enumerate((("data", f"{tmp_path}/data"), ("gs://b/data",) * 2), 1):
        jobs.train_small("run", max_steps=steps, data_dir=given)
        assert jobs.read_json("run", "run.json")["config"]["data_dir"] == kept
    fetched = []
    other = dataclasses.replace(toy_workload.WORKLOAD, name="other", examples=fetched.append)
    with pytest.raises(errors.RunError, match="workload was toy, now other. Give .*, --workload=toy_workload, or"):
        jobs.train_small("run", workload=other, max_steps=3)
    assert not fetched


def test_workers_share_the_code_of_the_networks_module_or_of_all_its_package(toy_run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_package").mkdir()
    network = "def inference(features, training):\n    return features\n"
    for name in ("a_package/__init__.py", "a_package/network.py", "a_package/layers.py", "alone.py", "beside.py"):
        (tmp_path / name).write_text(network)
    run_json = jobs.read_json(toy_run, "run.json")
    for module, changes in (("a_package.network", {"a_package/layers.py"}), ("alone", {"alone.py"})):
        network = importlib.import_module(module).inference
        workload = dataclasses.replace(toy_workload.WORKLOAD, inference=network)
        for name in ("a_package/layers.py", "alone.py", "beside.py"):
            before = manifest.same_everywhere(run_json, workload)["code"]
            (tmp_path / name).write_text(f"{(tmp_path / name).read_text()}# {module}\n")
            assert (manifest.same_everywhere(run_json, workload)["code"] != before) == (name in changes), (module, name)
    rglob, before = pathlib.Path.rglob, manifest.same_everywhere(run_json, workload)["code"]
    monkeypatch.setattr(pathlib.Path, "rglob", lambda *args: sorted(rglob(*args), reverse=True))  # as another disk may
    assert manifest.same_everywhere(run_json, workload)["code"] == before
