"""A cluster that shrinks and grows trains what one process trains that nobody touched: real processes, killed."""

import signal

import clusters
import elastic_log
import jobs
import pytest
import soak_workload

TIMEOUT_SECS = 3
COMMON = dict(
    workload="soak_workload:ELASTIC", dtype="float64", optimizer="momentum", learning_rate=0.05, clip_gradients=0.5,
    moving_average_decay=0.9, log_every_steps=1, summary_every_steps=0, save_every_steps=5, keep_checkpoints=0,
    check_data=False, num_gpus=1, batch_size=3,
)  # fmt: skip
CHANGING = COMMON | dict(max_steps=jobs.ENDLESS, elastic="2:3", worker_timeout_secs=TIMEOUT_SECS, start_timeout_secs=30)
GLOBAL_BATCH = 9


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv(soak_workload.LOG, str(tmp_path / "log"))
    monkeypatch.setenv(soak_workload.PAUSE_SECS, "0.05")
    return tmp_path / "log"


def wait_for_size(cluster, size, steps=1):
    """Until the last start of the chief is of so many workers and has done a few steps."""

    def reached():
        last = cluster.workers[0].output().rpartition("\nelastic:  ")[2]
        return last.startswith(f"{size} of 2 to 3 workers") and last.count(": step ") >= steps

    cluster.workers[0].wait_until(reached)


def test_fewer_workers_than_the_least_wait_and_then_leave_with_one_line(tmp_path, log):
    options = CHANGING | dict(start_timeout_secs=2, worker_timeout_secs=1)
    with clusters.Cluster(tmp_path / "run", 3, absent=[1, 2], **options) as cluster:
        assert cluster.end(0) == [138], cluster.outputs()
        [line] = [line for line in cluster.outputs()[0].splitlines() if "error:" in line]
    assert "error: 1 of 2 to 3 workers are there, and no more have come for 2 s. The last checkpoint stays:" in line
    assert not (tmp_path / "run" / "run.json").exists()


def test_three_workers_of_which_one_dies_and_returns_train_what_one_process_trains(tmp_path, log, monkeypatch):
    train_dir = tmp_path / "run"
    with clusters.Cluster(train_dir, 3, **CHANGING) as cluster:
        wait_for_size(cluster, 3, steps=7)
        cluster.workers[1].process.kill()
        wait_for_size(cluster, 2)
        cluster.workers[1] = cluster.start(1)
        wait_for_size(cluster, 3)
        cluster.workers[2].process.send_signal(signal.SIGTERM)
        assert cluster.end(2) == [143]
        left = f"as worker 2 ({cluster.hosts[2]}) was told to end. "
        cluster.workers[0].wait_until(lambda: left in cluster.workers[0].output())
    steps = jobs.saved_step(train_dir)
    found, sizes = elastic_log.trained(log, GLOBAL_BATCH, steps)
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [3, 2, 3]
    assert found == {step: list(range(9 * step, 9 * step + 9)) for step in range(steps)}
    monkeypatch.setenv(soak_workload.PAUSE_SECS, "0")
    jobs.train_toy(tmp_path / "alone", **(COMMON | dict(accumulate_steps=3, max_steps=steps)))
    jobs.assert_close(jobs.variables(train_dir, steps), jobs.variables(tmp_path / "alone", steps))
