"""scripts/train sets itself up once, from and in any directory, and says plainly what it lacks; what a wheel holds."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jobs
import pytest

from tower_train import host

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
    """Reads what pip was asked for."""
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
        [shutil.which("bash"), str(tree / "scripts" / script), *words], cwd=tree.parent, env=kept | variables,
        capture_output=True, text=True, timeout=jobs.WAIT_SECS,
    )  # fmt: skip


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
print(json.dumps([build.get_outputs(include_bytecode=False), vars(distribution.metadata)], default=str))
"""


def test_a_wheel_holds_every_file_of_both_packages_and_says_what_an_index_wants_to_know():
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETUP], cwd=jobs.ROOT, capture_output=True, text=True, check=True
    )
    files, metadata = json.loads(process.stdout.splitlines()[-1])
    folders = [jobs.ROOT / name for name in ("tower_train", "cifar10")]
    present = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted(files) == sorted(f"./{path.relative_to(jobs.ROOT)}" for path in present)
    assert all(metadata[name] for name in ("name", "description", "author", "license", "keywords", "python_requires"))
    assert metadata["long_description"] == (jobs.ROOT / "README.md").read_text()
    assert metadata["long_description_content_type"] == "text/markdown"
    assert f"## {metadata['version']}" in (jobs.ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(host.nvidia_driver() is not None, reason="with a driver TensorFlow's lines say what it finds")
def test_a_script_or_notebook_that_imports_it_first_has_no_lines_of_tensorflows_own(tmp_path):
    """A module takes TensorFlow's place, which remarks upon its import and upon its first use."""
    (tmp_path / "tensorflow.py").write_text(
        "import os, types\nos.write(2, b'import')\n"
        "config = types.SimpleNamespace(list_physical_devices=lambda kind: os.write(2, b'devices'))"
    )
    imports = "import tower_train, tensorflow"
    for name, line in {"script": "from tower_train import Config; import tensorflow", "help": imports}.items():
        (tmp_path / f"{name}.py").write_text(line)
    notebook = f"import sys; sys.modules['ipykernel'] = sys; {imports}"
    for words, stderr in ((["script.py"], b""), (["help.py"], b"import"), (["-c", notebook], b"")):
        python = [sys.executable, *words]
        found = subprocess.run(python, cwd=tmp_path, env=jobs.environment(tmp_path), capture_output=True)
        assert (found.returncode, found.stderr) == (0, stderr)
