"""A cluster that shrinks and grows trains what one process trains that nobody touched."""

import concurrent.futures
import contextlib
import re
import signal

import clusters
import jobs
import pytest
import soak_runs

from tower_train import errors
from tower_train.cluster.agreement import RunOver
from tower_train.cluster.rendezvous import Memory


def test_two_mirrored_workers_with_unequal_parts_then_one_and_then_none_that_is_elastic_are_one_tower(tmp_path):
    """Of three hosts: 2 batches and 1, then 3, then 3 of a run by itself."""
    train_dir, options = tmp_path / "run", clusters.NORM | dict(variable_update="mirrored", all_reduce="collective")
    for absent, least, steps in (([1], 2, 4), ([1, 2], 1, 7)):
        changes = dict(max_steps=steps, elastic=f"{least}:3", worker_timeout_secs=0.5)
        results = clusters.train_together(train_dir, 3, absent=absent, **(options | changes))
        assert [result.step for result in results] == [steps] * len(results), results
    jobs.train_toy(train_dir, **(options | dict(num_gpus=3, max_steps=9)))
    jobs.train_toy(tmp_path / "alone", **(clusters.NORM | dict(accumulate_steps=3, max_steps=9)))
    jobs.assert_close(jobs.variables(train_dir, 9), jobs.variables(tmp_path / "alone", 9))


def test_a_data_set_in_an_order_of_its_own_is_refused(tmp_path):
    options = clusters.NORM | dict(workload="element_workloads:PIPELINE", elastic="1:2", worker_timeout_secs=1.0)
    [error] = clusters.train_together(tmp_path, 2, absent=[1], **options)
    assert isinstance(error, errors.ConfigError)
    assert str(error).startswith("--elastic=1:2: ") and "comes in an order of its own" in str(error)


@pytest.fixture
def members(monkeypatch):
    """Three members, of which two may train together, and the chief has by itself, since it has lost the first."""
    monkeypatch.setenv(*Memory((0,), lost=(1,)).environment().popitem())
    hosts = clusters.hosts(3)
    found = [clusters.member(hosts, index, 2.0, 20.0, sizes=(1, 2)) for index in range(3)]
    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:  # the chief ends first

        def agree(index, seed=0):
            with found[index] as member:
                return member.agree(lambda: {"--seed": seed}, 3, 9)

        agreed = [pool.submit(stack.enter_context(found[0]).agree, lambda: {"--seed": 0}, 3, 9)]
        yield found, lambda *facts: agreed.append(pool.submit(agree, *facts)) or agreed[-1], agreed[0]


def test_who_comes_later_is_compared_waits_and_is_taken_in_and_who_is_too_many_hears_of_the_end(members, capsys):
    [chief, first, _], start, agreed = members
    assert tuple(agreed.result(jobs.WAIT_SECS)) == (3, 9) and chief._heartbeat.status.group == (0,)
    assert (chief.devices.num_workers, chief.devices.worker) == (1, 0)
    refused, waiting = start(2, 5), start(1)
    with pytest.raises(errors.ConfigError, match="worker 2 .* cannot train with the chief: --seed is 5, the chief's 0"):
        refused.result(jobs.WAIT_SECS)
    assert not chief.is_to_resize
    chief.note_step()
    jobs.wait_for(lambda: chief.is_to_resize and not chief._detector.is_silent(1))
    resized = chief.resized()
    assert "Saved at step 4, to go on with other workers. --elastic: " in str(resized), str(resized)
    assert resized.environment == {"TOWER_TRAIN_ELASTIC": '{"group": [0, 1], "idle_starts": 0, "lost": []}'}
    assert not waiting.done()
    assert chief.leave("last step") == "last step"
    with pytest.raises(RunOver) as over:
        waiting.result(jobs.WAIT_SECS)
    assert (over.value.stopped_by, over.value.step) == ("last step", 4)
    lines = capsys.readouterr().out.splitlines()
    assert f"*** {first.task.name(2)} cannot train with the chief: --seed is 5, the chief's 0. Start all " in str(lines)
    assert "*** The run has ended at step 4 (last step), without this worker." in lines
    assert f"*** Staying for at most 60 s, to tell {first.task.name(1)} that the run has ended." in lines
    assert re.search(r"\*\*\* 1 of at most 2 train, at step [34]: waiting for a place among them\.", str(lines))


def test_three_workers_of_which_one_dies_and_returns_train_what_one_process_trains(tmp_path):
    with soak_runs.scripted(tmp_path, 3, 3, elastic="2:3", save_every_steps=2) as run:

        def await_size(size):
            last = ""
            while not last.startswith(f"{size} of 2 to 3 workers") or last.count(": step ") < 3:
                run.await_step()
                last = run.running[0].output().rpartition("\nelastic:  ")[2]

        await_size(3)
        run.end_one(1, signal.SIGKILL, returns=False)
        await_size(2)
        run.due[1] = 0
        await_size(3)
        run.end()
    assert [size for size, before in zip(run.sizes, [0, *run.sizes], strict=False) if size != before] == [3, 2, 3]
