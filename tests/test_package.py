"""A wheel holds all files of both packages, and says what an index wants to know; a script's import of it is quiet."""

import json
import subprocess
import sys

import jobs
import pytest

from tower_train import host

SCRIPT = """
import json
import setuptools
from distutils.core import run_setup

distribution = run_setup("setup.py", stop_after="init")
build = distribution.get_command_obj("build_py")
build.ensure_finalized()
build.build_lib = "."
print(json.dumps([build.get_outputs(include_bytecode=False), vars(distribution.metadata)], default=str))
"""


@pytest.fixture(scope="module")
def package():
    """(the files of both packages in a wheel, the metadata), as setuptools sees them."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=jobs.ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def test_a_wheel_holds_every_file_of_both_packages(package):
    folders = [jobs.ROOT / name for name in ("tower_train", "cifar10")]
    present = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted(package[0]) == sorted(f"./{path.relative_to(jobs.ROOT)}" for path in present)


def test_the_metadata_are_complete(package):
    metadata = package[1]
    for name in ("name", "version", "description", "author", "license", "keywords", "python_requires"):
        assert metadata[name], name
    assert metadata["long_description"] == (jobs.ROOT / "README.md").read_text()
    assert metadata["long_description_content_type"] == "text/markdown"
    assert f"## {metadata['version']}" in (jobs.ROOT / "CHANGELOG.md").read_text()
    assert {"3.10", "3.13"} <= {name.rpartition(" ")[2] for name in metadata["classifiers"]}


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
