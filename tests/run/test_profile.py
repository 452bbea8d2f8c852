"""--profile_steps: a profile of just these steps, and never more than a line about one that cannot be."""

import re

import jobs
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tower_train import errors


def planes(train_dir):
    """{plane's name: {event's name: [the events' step numbers, None for those without]}} of the only profile."""
    [path] = train_dir.glob("plugins/profile/*/*.xplane.pb")
    found = {}
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        events = found.setdefault(plane.name, {})
        names = {stat.id: stat.name for stat in plane.stat_metadata.values()}
        for line in plane.lines:
            for event in line.events:
                values = {names[stat.metadata_id]: stat.int64_value for stat in event.stats}
                numbers = [values["step_num"]] if "step_num" in values and values.get("_r") == 1 else []
                events.setdefault(plane.event_metadata[event.metadata_id].name, []).extend(numbers)
    return found


def test_the_steps_asked_for_are_profiled_and_change_nothing(toy_run, tmp_path, capsys):
    jobs.train_toy(tmp_path, max_steps=40, summary_every_steps=10, profile_steps=(10, 20))
    assert re.search(
        rf"^Profiled: steps 10 to 20, for `tensorboard --logdir={tmp_path}`", capsys.readouterr().out, re.M
    )
    host = planes(tmp_path)["/host:CPU"]
    assert sorted(host["train"]) == list(range(10, 21))
    assert any("MatMul" in name for name in host), "no operation of the network"
    jobs.assert_identical(jobs.variables(tmp_path), jobs.variables(toy_run, 40))


def test_a_resumed_run_and_one_that_ends_before_profile_what_they_do(tmp_path, capsys):
    jobs.train_small(tmp_path, max_steps=12)
    jobs.train_small(tmp_path, max_steps=20, profile_steps=(10, 90))
    assert "Profiled: steps 13 to 20, " in capsys.readouterr().out
    assert sorted(planes(tmp_path)["/host:CPU"]["train"]) == list(range(13, 21))
    jobs.train_small(tmp_path, max_steps=25, profile_steps=(10, 10))  # was done before
    assert "Profiled" not in capsys.readouterr().out


def test_steps_after_the_last_are_refused(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"^--profile_steps=30,40: the run ends at step 20\. Choose earlier"):
        jobs.train_small(tmp_path / "run", max_steps=20, profile_steps=(30, 40))


def test_a_profile_that_cannot_be_costs_a_line(tmp_path, capsys):
    tf.profiler.experimental.start(str(tmp_path / "mine"))
    try:
        result = jobs.train_small(tmp_path / "run", max_steps=6, profile_steps=(5, 6))
    finally:
        tf.profiler.experimental.stop(save=False)
    assert result.step == 6
    told = [line for line in capsys.readouterr().out.splitlines() if "--profile_steps" in line]
    assert told == ["*** --profile_steps: no profile (Another profiler is running). The run goes on."]
