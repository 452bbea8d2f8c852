"""Console scripts: tower-train is `python -m tower_train`, tower-train-evaluate `python -m tower_train.evaluate`."""

import pathlib
import runpy
import sys


def run() -> None:
    """Runs the command by whose name this process was started."""
    command = pathlib.Path(sys.argv[0]).stem.removeprefix("tower-train").replace("-", "_").replace("_", ".", 1)
    runpy.run_module(f"tower_train{command}", run_name="__main__", alter_sys=True)
