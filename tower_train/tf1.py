"""python -m tower_train.tf1: a program of TensorFlow 1, as it was published, on today's TensorFlow."""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types

from tower_train import console, errors
from tower_train.options import command_line


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        command = "python -m tower_train.tf1 [--check] [--num_gpus=N] PROGRAM.py [ARGUMENTS]"
        raise errors.ConfigError(f"{message}. Write: {command}")


def main(argv) -> int:
    parser = _Parser(
        "python -m tower_train.tf1",
        description="Runs a program of TensorFlow 1 (2016 to 2019) or of Keras 2 as it was published, on today's "
        "TensorFlow: docs/migration.md. Exit status: the program's; 2 for a name that is missing or a "
        "wrong option.",
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="run nothing: list the names that are missing")
    parser.add_argument("--num_gpus", type=int, default=0, help="how many GPUs the program sees if there are none")
    parser.add_argument("program", help="its file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args(argv[1:])
    from tower_train.fronts.tf1 import source

    program = source.Program(asked.program)
    for package in ("tensorflow_estimator", "tf_keras"):
        if not importlib.util.find_spec(package):
            raise errors.ConfigError(f"The package {package} is missing. Install it: pip install 'tower_train[tf1]'")
    if not program.uses_keras_3:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.layers and the cells of RNNs are parts of Keras 2
    console.import_tensorflow()
    from tower_train.fronts.tf1 import keras_models, views

    if program.uses_keras:
        keras_models.prepare(program.uses_keras_3, is_named_acc=bool({"acc", "val_acc"} & program.words))
    find = views.finder(program.uses_keras_3)
    return _check(program, find) if asked.check else _run(asked, program, find)


def companion(name: str) -> types.SimpleNamespace:
    """Imports a file of TensorFlow 1, such as the tutorial's cifar10.py, for a workload.

    From then on, all files of this process that are not installed import the old names.
    """
    from tower_train.fronts.tf1 import views

    views.install(views.finder(uses_keras_3=False))
    parts = vars(importlib.import_module(name))
    functions = {each: _dimensions()(part) for each, part in parts.items() if isinstance(part, types.FunctionType)}
    return types.SimpleNamespace(**parts | functions)


@contextlib.contextmanager
def _dimensions():
    """Lets the function that this decorates ask for shape[0].value, as shapes had Dimensions."""
    from tensorflow.compat import v1

    v1.disable_v2_tensorshape()
    try:
        yield
    finally:
        v1.enable_v2_tensorshape()


def _check(program, find) -> int:
    missing: dict[str, dict] = {}
    for name, place in program.uses:
        try:
            find(name)
        except errors.ConfigError as error:
            missing.setdefault(str(error), {})[place] = None
    for name, place in program.of_python_2:
        missing.setdefault(f"{name} is of Python 2. Convert it first: 2to3 -w (of Python 3.12).", {})[place] = None
    for why, places in missing.items():
        console.say(f"{', '.join(places)}: {why}")
    kind = "Keras 3, eagerly" if program.uses_keras_3 else "TensorFlow 1's behaviour, with Keras 2"
    console.say(f"Missing names: {len(missing)}. It runs with {kind}.\nIts towers: {program.front}.")
    return 2 if missing else 0


def _run(asked, program, find) -> int:
    import tensorflow as tf

    from tower_train.cluster import program as workers
    from tower_train.fronts.tf1 import source, views

    if not program.uses_keras_3:
        tf.compat.v1.disable_v2_behavior()
    views.prepare_machine(asked.num_gpus)
    views.install(find)
    workers.leave_by_status()  # with one line for a user's mistake, and with Horovod's workers
    sys.argv[:] = [asked.program, *asked.arguments]
    is_there = not getattr(sys.flags, "safe_path", False)  # the current folder, which the program's replaces
    sys.path[:is_there] = [str(program.folder)]
    # not by runpy, under which a program's __package__ is no longer None, as some ask
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__file__ = asked.program
    if program.top != program.folder:  # as `python -m PACKAGE.PROGRAM` runs it
        sys.path.append(str(program.top))
        module.__package__ = ".".join(program.folder.relative_to(program.top).parts)
    try:
        exec(compile(pathlib.Path(asked.program).read_bytes(), asked.program, "exec"), vars(module))
    except KeyboardInterrupt as error:
        if workers.is_initialized():  # Horovod's, which would wait for this one
            workers.current().shutdown(error)
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next and not source.is_of_program(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next  # of this file
        if isinstance(error, views.NoSuchName | views.NoSuchModule):
            own = [each for each in traceback.extract_tb(trace) if source.is_of_program(each.filename)][-1]
            error.args = (f"{own.filename}:{own.lineno}: {error}",)
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # tells other workers
        return 1
    return 0


if __name__ == "__main__":
    command_line.run(main)
