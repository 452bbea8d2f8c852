"""python -m tower_train.tf1: a program of TensorFlow 1, as it was published, on today's TensorFlow."""

import argparse
import importlib.util
import os
import runpy
import sys
import types

from tower_train import console, errors
from tower_train.options import command_line


def main(argv) -> int:
    parser = argparse.ArgumentParser(
        "python -m tower_train.tf1",
        description="Runs a program of TensorFlow 1 (2016 to 2019) or of Keras 2 as it was published, on today's "
        "TensorFlow: docs/migration.md. Exit status: the program's; 2 for a name that is not there or a wrong option.",
        allow_abbrev=False,
    )
    parser.error = _refuse  # type: ignore[assignment, method-assign]
    parser.add_argument("--check", action="store_true", help="run nothing: list the names that are not there")
    parser.add_argument("--num_gpus", type=int, default=0, help="GPUs that it is told of where there are none")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv[1:])
    from tower_train.fronts.tf1 import source

    program = source.read(asked.program)
    for package in ("tensorflow_estimator", "tf_keras"):
        if not importlib.util.find_spec(package):
            raise errors.ConfigError(f"The package {package} is missing. Install it: pip install 'tower_train[tf1]'")
    if not program.uses_keras_3:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.layers and the cells of RNNs are parts of Keras 2
    console.quiet_tensorflow()
    from tower_train.fronts.tf1 import views

    names = views.Names(program.uses_keras_3)
    return _check(program, names) if asked.check else _run(asked, program, names)


def _refuse(reason: str):
    raise errors.ConfigError(f"{reason}: python -m tower_train.tf1 [--check] [--num_gpus=N] PROGRAM.py [its arguments]")


def companion(name: str) -> types.SimpleNamespace:
    """Imports a file of TensorFlow 1, such as the tutorial's cifar10.py, for a workload. From then on imports of files
    that are not installed give the old names in this process."""
    from tower_train.fronts.tf1 import views

    views.install_once()
    parts = vars(importlib.import_module(name))
    functions = {each: _with_dimensions(part) for each, part in parts.items() if isinstance(part, types.FunctionType)}
    return types.SimpleNamespace(**parts | functions)


def _with_dimensions(function):
    """Gives shapes their Dimensions within a function, as shape[0].value asks."""

    def call(*args, **kwargs):
        from tensorflow.compat import v1

        v1.disable_v2_tensorshape()
        try:
            return function(*args, **kwargs)
        finally:
            v1.enable_v2_tensorshape()

    return call


def _check(program, names) -> int:
    missing: dict[str, list] = {}
    for name, place in program.uses:
        try:
            names.find(name)
        except errors.ConfigError as error:
            places = missing.setdefault(str(error), [])
            places += [place] if place not in places else []
    for why, places in missing.items():
        console.say(f"{', '.join(places[:3])}{' ...' if len(places) > 3 else ''}: {why}")
    kind = "Keras 3, eagerly" if program.uses_keras_3 else "TensorFlow 1's behaviour, with Keras 2"
    console.say(f"{len(missing)} names are not there. It runs with {kind}.\nIts towers: {program.front}.")
    return 2 if missing else 0


def _run(asked, program, names) -> int:
    import tensorflow as tf

    from tower_train.cluster import program as workers
    from tower_train.fronts.tf1 import keras_models, machine

    if program.uses_keras_3:
        keras_models.prepare(is_named_acc=bool({"acc", "val_acc"} & program.words))
    else:
        tf.compat.v1.disable_v2_behavior()
    machine.prepare(asked.num_gpus)
    names.install()
    workers.leave_by_status()  # with one line for a user's mistake, and with Horovod's workers
    sys.argv[:] = [asked.program, *asked.arguments]
    is_there = not getattr(sys.flags, "safe_path", False)  # the current folder, for which the program's comes
    sys.path[:is_there] = [os.path.dirname(os.path.abspath(asked.program))]
    try:
        runpy.run_path(asked.program, run_name="__main__")
    except KeyboardInterrupt as error:
        if workers.is_initialized():  # Horovod's, which would wait for this one
            workers.current().shutdown(error)
        raise
    except Exception as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this frame and runpy's
        while trace and trace.tb_next and "runpy" in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # tells other workers
        return 1
    return 0


if __name__ == "__main__":
    command_line.run(main)
