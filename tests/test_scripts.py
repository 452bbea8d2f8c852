"""scripts/train sets itself up once, from and in any directory, and says plainly what it lacks; what a wheel holds;
scripts/local_cluster, and what starts a cluster elsewhere, as far as it can be checked without one. scripts/gpu_check
on CPUs, where what is cheap runs for real, and scripts/soak."""

import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys

import jobs
import pytest
import soak
import yaml

from tower_train.config import Config
from tower_train.options import command_line

FILES = [path for folder in (".ci", "scripts") for path in (jobs.ROOT / folder).iterdir() if path.is_file()]
SCRIPTS = [path for path in FILES if path.suffix in ("", ".sh")]

# Stands in for pip, which would need a network: notes its arguments and does what an editable install does.
PIP = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("PIP_FAILS"):
    sys.exit(1)
(here.parent / "editable.pth").write_text(sys.argv[-1].partition("[")[0])
"""


def make_environment(path):
    """A virtual environment with the packages of this one and a pip that needs no network."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    [packages] = pathlib.Path(path).glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(entry for entry in sys.path if entry.endswith("site-packages")))
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").write_text("")
    (packages / "pip" / "__main__.py").write_text(PIP)
    return pathlib.Path(path)


def installs(environment):
    calls = list(environment.glob("lib/python*/site-packages/pip/calls.jsonl"))
    return [json.loads(line)[-1] for path in calls for line in path.read_text().splitlines()]


@pytest.fixture
def tree(tmp_path):
    """A copy of what the scripts need of this repository, in a directory whose name has spaces."""
    root = tmp_path / "my copy of it"
    for folder in ("scripts", "tower_train", "cifar10"):
        shutil.copytree(jobs.ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(jobs.ROOT / "setup.py", root)
    return root


def run_script(tree, *words, script="train", **variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHON")}
    return subprocess.run(
        [shutil.which("bash"), str(tree / "scripts" / script), *words],
        cwd=tree.parent,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=jobs.WAIT_SECS,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert path.suffix or os.access(path, os.X_OK)


@pytest.mark.parametrize("script", ["soak", "gpu_check", "local_cluster"])
def test_help_needs_no_environment(script, tree):
    process = run_script(tree, "--help", script=script)
    assert (process.returncode, process.stderr) == (0, "")
    assert f"scripts/{script}" in process.stdout and "BASH_SOURCE" not in process.stdout
    assert not (tree / ".venv").exists()


def test_it_installs_once_into_the_active_environment_and_runs_from_any_directory(tree, tmp_path):
    """An install that failed is told and done again; one that is whole is done again for other requirements."""
    environment = make_environment(tmp_path / "an env")
    process = run_script(tree, "--help", VIRTUAL_ENV=str(environment), PIP_FAILS="1")
    assert process.returncode == 2 and "error: pip could not install tower_train" in process.stderr
    for _ in range(2):
        process = run_script(tree, "--help", VIRTUAL_ENV=str(environment))
        assert process.returncode == 0, process.stderr
        assert "python -m tower_train --num_gpus=N" in " ".join(process.stdout.split())
        assert installs(environment) == [str(tree)] * 2
    assert process.stderr == ""  # the second time there is nothing to do
    assert not (tree / ".venv").exists()

    with open(tree / "setup.py", "a") as file:
        file.write("# another requirement\n")
    process = run_script(tree, "--data_dir=a b", "--num_gpus=0", VIRTUAL_ENV=str(environment))
    assert len(installs(environment)) == 3
    assert process.returncode == 2 and process.stderr.endswith(
        "tower_train: error: --num_gpus=0: it must be a whole number at least 1 and at most 1024.\n"
    )


def test_with_an_nvidia_driver_it_installs_cudas_libraries_too(tree, tmp_path):
    environment = make_environment(tmp_path / "env")
    driver = tmp_path / "driver"
    driver.touch()
    run_script(tree, "--help", VIRTUAL_ENV=str(environment), NVIDIA_DRIVER=str(driver))
    assert installs(environment) == [f"{tree}[gpu]"]
    set_up = 'source "$1/scripts/setup_env.sh"; set_up "[test]"'
    variables = os.environ | {"VIRTUAL_ENV": str(environment), "NVIDIA_DRIVER": str(driver)}
    subprocess.run(["bash", "-c", set_up, str(tree / "scripts" / "train"), str(tree)], env=variables, check=True)
    assert installs(environment)[1:] == [f"{tree}[gpu,test]"]


def test_without_an_active_environment_it_makes_one_with_the_python_it_is_given(tree, tmp_path):
    prepared, python = make_environment(tmp_path / "prepared"), tmp_path / "my python"
    python.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then exec cp -r "{prepared}" "$3"; fi
exec "{sys.executable}" "$@"
"""
    )
    python.chmod(0o755)
    process = run_script(tree, "--help", PYTHON=str(python))
    assert process.returncode == 0, process.stderr
    assert "Making a virtual environment" in process.stderr
    assert installs(tree / ".venv") == [str(tree)]


@pytest.mark.parametrize("too_old", [False, True])
def test_a_machine_without_a_python_that_fits_is_told_so(too_old, tree, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "cksum"):
        (tools / tool).symlink_to(shutil.which(tool))
    if too_old:
        (tools / "python3").write_text("#!/bin/sh\nexit 1\n")  # what the question for its version gives
        (tools / "python3").chmod(0o755)
    process = run_script(tree, "--help", PATH=str(tools))
    assert process.returncode == 2
    assert process.stdout == ""
    [line] = process.stderr.splitlines()
    assert "error: no Python 3.10 to 3.13 found" in line
    assert not (tree / ".venv").exists()


SETUP = """
import json
import setuptools
from distutils.core import run_setup

distribution = run_setup("setup.py", stop_after="init")
build = distribution.get_command_obj("build_py")
build.ensure_finalized()
build.build_lib = "."
files = build.get_outputs(include_bytecode=False)
print(json.dumps([files, vars(distribution.metadata), distribution.entry_points], default=str))
"""


def test_a_wheel_holds_every_file_of_both_packages_and_says_what_an_index_wants_to_know():
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETUP], cwd=jobs.ROOT, capture_output=True, text=True, check=True
    )
    files, metadata, entry_points = json.loads(process.stdout.splitlines()[-1])
    folders = [jobs.ROOT / name for name in ("tower_train", "cifar10")]
    present = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted(files) == sorted(f"./{path.relative_to(jobs.ROOT)}" for path in present)
    assert all(metadata[name] for name in ("name", "description", "author", "license", "keywords", "python_requires"))
    assert metadata["long_description_content_type"] == "text/markdown"
    commands = [
        path.stem for path in (jobs.ROOT / "tower_train").glob("*.py") if "\nif __name__ ==" in path.read_text()
    ]
    scripts = {"tower-train", *(f"tower-train-{name.replace('_', '-')}" for name in commands if name != "__main__")}
    assert {line.partition(" = ")[0] for line in entry_points["console_scripts"]} == scripts
    assert f"## {metadata['version']}" in (jobs.ROOT / "CHANGELOG.md").read_text()


LOCAL_CLUSTER = jobs.ROOT / "scripts" / "local_cluster.py"
TFJOB = jobs.ROOT / "scripts" / "k8s" / "tfjob.yaml"
SBATCH = jobs.ROOT / "scripts" / "slurm" / "tower_train.sbatch"


def test_a_local_cluster_passes_on_lines_signals_and_the_chiefs_status():
    waiting = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); print('here'); time.sleep(3600)"
    words = [sys.executable, LOCAL_CLUSTER, "--workers=2", "--", "python", "-c", waiting]
    with subprocess.Popen(words, env=jobs.environment(), text=True, stdout=subprocess.PIPE) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[worker 0] here\n", "[worker 1] here\n"]
        process.send_signal(signal.SIGINT)
        assert process.wait(jobs.WAIT_SECS) == 130


def test_a_local_clusters_trainer_gets_its_place_beside_the_options(monkeypatch):
    start = runpy.run_path(LOCAL_CLUSTER)["_start"]
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: words)
    words = start(["a:1", "b:2"], 1, ["--num_gpus=2", "--override"], None)
    assert words[:4] == [sys.executable, "-u", "-m", "tower_train"]
    expected = Config(num_gpus=2, override=True, worker_hosts="a:1,b:2", task_index=1)
    assert command_line.parse(words[3:], Config, "") == expected


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
        return subprocess.run(
            command, env=jobs.environment(), text=True, capture_output=True, cwd=tmp_path, timeout=jobs.WAIT_SECS
        )

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


def test_the_measurements_of_a_gpus_speed_run_on_small_numbers_anywhere(tmp_path):
    """One of its parts: the others are the benchmark's, a training without a profile, and a comparison that
    tests/graph/test_compiled.py makes."""
    words = [jobs.ROOT / "scripts/gpu_speed.py", "--tiny", f"--out={tmp_path}/speed", "profile"]
    done = jobs.command(*map(str, words))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "speed" / "speed.json").read_text())
    assert found["profile"]["launches"] == 0, "there is no GPU"
    assert "profile: GPUs work 0.00 ms a step" in done.stdout


def gpu_check(folder, *words, python=sys.executable, **variables):
    environment = jobs.environment() | {"GPU_CHECK_PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "-1"} | variables
    words = [jobs.ROOT / "scripts" / "gpu_check", f"--out={folder / 'a b'}", *words]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_without_a_gpu_it_checks_what_it_can_and_names_the_rest(tmp_path):
    status, output = gpu_check(tmp_path, "towers", PYTEST_ADDOPTS="-k 'toy-collective or toy-nccl'")
    assert status == 0, output
    assert re.findall(r"^PASSED .*::(.*)$", output, re.MULTILINE) == ["test_towers_are_one[toy-collective]"]
    assert re.search("^measured: greatest relative difference .*e-1[0-9]$", output, re.MULTILINE)
    assert "NCCL needs several GPUs" in output


def test_sections_that_fail_or_crash_are_lines_and_not_the_end(tmp_path):
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\ncase "$*" in *machine*) echo "FAILED x"; exit 1;; *) kill -ABRT $$;; esac\n')
    python.chmod(0o755)
    status, output = gpu_check(tmp_path, "machine", "frontends", python=python)
    assert status == 1
    lines = output.splitlines()
    assert lines[:2] == ["== machine", "FAILED x"] and lines[2].startswith("FAILED: status 1 (")
    assert lines[3] == "== frontends" and lines[-1].startswith("FAILED: status 134 (")
    assert gpu_check(tmp_path, "engine") == (
        2,
        f"{jobs.ROOT}/scripts/gpu_check: error: engine: give --out=DIR, "
        "--minutes=N, machine, towers, runs or frontends.\n",
    )


def test_a_few_trials_lose_and_repeat_nothing_and_end_in_one_line(capsys):
    assert soak.main(["--cases=alone", "--trials=2", "--seed=2"]) == 0
    line = r"alone: 3 trials .*damaged checkpoint 1, .*kill 1.*; lost, different or untrue: 0"
    assert re.search(line, capsys.readouterr().out)
