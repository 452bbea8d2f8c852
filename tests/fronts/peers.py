"""Runs TensorFlow Estimator's own tests, unchanged, on tower_train.estimator, and prints a row for each file.

    git clone --depth=1 --branch=v2.15.0 https://github.com/tensorflow/estimator /tmp/estimator
    python tests/fronts/peers.py /tmp/estimator [FILE...]

The classes and functions of tower_train.estimator are in the places of the library's. All run in TensorFlow 1's mode,
in which most were written, but keras_test in TensorFlow 2's. The output of each file is FILE.log in the current folder.
"""

import collections
import importlib
import os
import pathlib
import re
import subprocess
import sys
import types

LIBRARY = "tensorflow_estimator.python.estimator"
FILES = (
    "estimator_test",
    "run_config_test",
    "exporter_test",
    "model_fn_test",
    "training_test",
    "keras_test",
    "canned/v1/baseline_test_v1",
    "canned/v1/dnn_test_fc_v2_v1",
    "canned/v1/linear_test_v1",
    "canned/v1/dnn_linear_combined_test_v1",
)


def put_ours_in_place(folder: pathlib.Path) -> None:
    """Makes the library's modules those of tower_train.estimator, and finds tests' helpers in its repository."""
    from tower_train import estimator as ours

    def module(name):
        return importlib.import_module(f"{LIBRARY}.{name}")

    base = ours.Estimator
    module("estimator").Estimator = module("estimator").EstimatorV2 = base
    module("run_config").RunConfig = ours.RunConfig
    module("training").train_and_evaluate = ours.train_and_evaluate
    module("keras_lib").model_to_estimator = ours.model_to_estimator
    canned = module("canned")
    for name in ("dnn", "linear", "baseline", "dnn_linear_combined"):
        theirs = module(f"canned.{name}")
        changed = types.ModuleType(theirs.__name__)
        vars(changed).update(vars(theirs))
        for key in vars(theirs).keys() & vars(ours).keys():
            if isinstance(getattr(ours, key), type) and issubclass(getattr(ours, key), base):
                setattr(changed, key, getattr(ours, key))
        setattr(canned, name, changed)
    for package, where in ((canned, "canned"), (module("canned.v1"), "canned/v1")):
        package.__path__.append(str(folder / where))


def run(folder: pathlib.Path, file: str) -> int:
    import pytest
    import tensorflow as tf

    if file != "keras_test":
        tf.compat.v1.disable_v2_behavior()
    put_ours_in_place(folder)
    words = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-rfE", "--tb=short", "-W", "ignore"]
    return pytest.main([str(folder / f"{file}.py"), *words, "-o", "addopts=", f"--rootdir={folder}"])


def main(repository: str, *files: str) -> None:
    folder = pathlib.Path(repository).absolute().joinpath(*LIBRARY.split("."))
    if "PEERS_FILE" in os.environ:
        sys.exit(run(folder, os.environ["PEERS_FILE"]))
    for file in files or FILES:
        about = {"PEERS_FILE": file, "TF_USE_LEGACY_KERAS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        log = pathlib.Path(f"{pathlib.Path(file).name}.log")
        with log.open("w") as output:
            subprocess.run([sys.executable, __file__, repository], env=os.environ | about, stdout=output, stderr=output)
        *_, last = log.read_text().splitlines()
        counts = collections.Counter({kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", last)})
        print(f"{file}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
