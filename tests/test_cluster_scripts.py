"""scripts/local_cluster, and what starts a cluster elsewhere, as far as it can be checked without one."""

import json
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


def test_a_local_cluster_has_an_evaluator_for_a_program_that_wants_one():
    words = [sys.executable, LOCAL_CLUSTER, "--workers=2", "--evaluator"]
    source = "import os; print(os.environ['TF_CONFIG'])"
    done = subprocess.run(
        [*words, "--", "python", "-c", source], env=jobs.environment(), capture_output=True, text=True
    )
    printed = dict(line.removeprefix("[").split("] ", 1) for line in done.stdout.splitlines())
    tasks = {name: json.loads(text) for name, text in printed.items()}
    assert tasks["evaluator"]["task"] == {"type": "evaluator", "index": 0}
    assert tasks["worker 1"]["task"] == {"type": "worker", "index": 1}
    assert len({str(each["cluster"]) for each in tasks.values()}) == 1 and len(tasks) == 3
    alone = subprocess.run(words, env=jobs.environment(), capture_output=True, text=True)
    assert alone.returncode == 2 and "--evaluator is for programs, as in --evaluator -- python mine.py" in alone.stderr


def test_an_evaluator_does_not_outlive_a_chief_that_failed():
    source = """import json, os, sys, time
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
    time.sleep(3600)
sys.exit(138)"""
    words = [sys.executable, LOCAL_CLUSTER, "--workers=2", "--evaluator", "--", "python", "-c", source]
    assert subprocess.run(words, env=jobs.environment(), timeout=jobs.WAIT_SECS).returncode == 138


def test_a_local_cluster_of_any_program_gives_each_its_place_and_words():
    source = """import json, os, sys
place = json.loads(os.environ["TF_CONFIG"])
print(len(set(place["cluster"]["worker"])), place["task"], sys.argv[1:])
sys.exit(7 - place["task"]["index"])"""
    words = [sys.executable, LOCAL_CLUSTER, "--workers=3", "--", "python", "-c", source, "--workers=9", "--"]
    process = subprocess.run(words, env=jobs.environment(), text=True, capture_output=True, check=False)
    expected = [f"[worker {i}] 3 {{'type': 'worker', 'index': {i}}} ['--workers=9', '--']" for i in range(3)]
    assert (process.returncode, sorted(process.stdout.splitlines())) == (7, expected), process.stderr
    refused = subprocess.run([*words[:2], "--num_gpus=2", *words[3:5]], env=jobs.environment(), text=True,
                             capture_output=True, check=False)  # fmt: skip
    assert refused.returncode == 2 and "--num_gpus=2 -- python: give --workers, then --" in refused.stderr


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
