"""scripts/local_cluster, and what starts a cluster elsewhere, as far as it can be checked without one."""

import os
import re
import signal
import subprocess
import sys

import jobs
import pytest
import yaml

from tower_train.config import Config
from tower_train.options import command_line

LOCAL_CLUSTER = jobs.ROOT / "scripts" / "local_cluster.py"
TFJOB = jobs.ROOT / "scripts" / "k8s" / "tfjob.yaml"
SBATCH = jobs.ROOT / "scripts" / "slurm" / "tower_train.sbatch"


def test_a_local_cluster_passes_on_lines_signals_and_the_chiefs_status(tmp_path):
    options = dict(workload="norm_workload", train_dir=tmp_path, max_steps=jobs.ENDLESS, check_towers="never")
    words = jobs.flags(batch_size=4, num_gpus=2, **options)
    with subprocess.Popen(
        [sys.executable, LOCAL_CLUSTER, "--workers=2", *words], env=jobs.environment(jobs.TESTS), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line)
            if ": step 10, loss" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(jobs.WAIT_SECS) == 130, lines
    assert all(re.match(r"\[worker [01]\] ", line) for line in lines)
    assert any("batch:    16 examples a step (2 x 4 on each of 2 workers)" in line for line in lines)
    assert any(line.startswith("[worker 1] worker 1 (localhost:") for line in lines)
    assert any("Stopped by SIGINT at step" in line for line in lines)


def test_a_local_cluster_of_any_program_gives_each_its_place_and_words_and_no_evaluator_outlives_its_chief(tmp_path):
    source = """import json, os, sys, time
place = json.loads(os.environ["TF_CONFIG"])
print(len(set(place["cluster"]["worker"])), place["task"], sys.argv[1:], flush=True)
if place["task"]["type"] == "evaluator":
    open("there", "w").close()
    time.sleep(3600)
while not os.path.exists("there"):
    time.sleep(0.01)
sys.exit(7 - place["task"]["index"])"""

    def local_cluster(*words):
        command = [sys.executable, LOCAL_CLUSTER, *words]
        return subprocess.run(command, env=jobs.environment(), text=True, capture_output=True, cwd=tmp_path,
                              timeout=jobs.WAIT_SECS)  # fmt: skip

    done = local_cluster("--workers=3", "--evaluator", "--", "python", "-c", source, "--workers=9", "--")
    tasks = {f"worker {i}": {"type": "worker", "index": i} for i in range(3)}
    tasks["evaluator"] = {"type": "evaluator", "index": 0}
    expected = [f"[{name}] 3 {task} ['--workers=9', '--']" for name, task in tasks.items()]
    assert (done.returncode, sorted(done.stdout.splitlines())) == (7, sorted(expected)), done.stderr
    for words, line in (
        (["--workers=2", "--num_gpus=2", "--", "python"], "--num_gpus=2 -- python: give --workers, then --"),
        (["--workers=2", "--evaluator"], "--evaluator is for programs, as in --evaluator -- python mine.py"),
    ):
        done = local_cluster(*words)
        assert done.returncode == 2 and line in done.stderr


def test_the_manifest_is_a_tfjob_that_gives_the_trainer_options_that_it_has():
    policy, job = yaml.safe_load_all(TFJOB.read_text())
    assert policy["spec"]["podSelector"]["matchLabels"] == {"training.kubeflow.org/job-name": job["metadata"]["name"]}
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert job["spec"]["tfReplicaSpecs"].keys() == {"Chief", "Worker"}
    for spec in job["spec"]["tfReplicaSpecs"].values():
        [container] = spec["template"]["spec"]["containers"]
        assert spec["restartPolicy"] == "ExitCode" and container["name"] == "tensorflow"
        config = command_line.parse(["tower_train", *container["args"]], Config, "")
        assert config.num_gpus == 8 and config.train_dir.startswith("/runs/") and config.start_timeout_secs >= 3600


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (2, False), (138, True), (143, True)])
def test_the_batch_file_starts_again_what_lost_a_worker_or_ran_out_of_time(status, requeued, tmp_path):
    """With an srun and an scontrol that note how they were called."""
    for name, ending in (("srun", f"exit {status}"), ("scontrol", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n{ending}\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    process = subprocess.run(["bash", SBATCH, "--max_steps=5"], env=environment, check=False)
    assert process.returncode == status
    srun, *others = (tmp_path / "calls").read_text().splitlines()
    assert others == (["scontrol requeue 77"] if requeued else [])
    words = srun.partition("tower_train ")[2].split()
    config = command_line.parse(["tower_train", *words], Config, "")
    assert config.max_steps == 5 and config.start_timeout_secs >= 3600
