"""The modules that only a program of TensorFlow 1 imports, and the machine as it sees it."""

import builtins
import contextlib
import functools
import importlib
import itertools
import pkgutil
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tower_train import console, errors
from tower_train.cluster import program
from tower_train.fronts import compat
from tower_train.fronts.tf1 import names, source

_tell_once = functools.cache(console.notice)


class NoSuchName(errors.ConfigError, AttributeError):
    """A name of TensorFlow 1 that is not there."""


class NoSuchModule(errors.ConfigError, ImportError):
    """The same in an import."""


class View(types.ModuleType):
    """A module of TensorFlow 1: looks its names up when they are used, in the modules that have them today."""

    def __init__(self, name: str, find: Callable[[str], Any], modules: list, rows: list[str]):
        super().__init__(name)
        self.__path__, self._find, self._modules, self._rows = [], find, modules, rows

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from it import *`
            return [each for each in dir(self) if not each.startswith("_") and hasattr(self, each)]
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return self._find(f"{self.__name__}.{name}")

    @property
    def __dict__(self):  # programs ask tf.logging.__dict__["INFO"]
        return {name: getattr(self, name) for name in self.__all__}

    def __dir__(self):
        return sorted({*self._rows, *(each for module in self._modules for each in dir(module))})


def finder(uses_keras_3: bool) -> Callable[[str], Any]:
    """Returns a function that looks a dotted name up in the table of names and returns what it means, or raises
    NoSuchName. It returns an object itself for the names of its attributes."""
    compat.restore_names_for_slim()
    table = names.table(uses_keras_3)

    @functools.cache
    def find(name: str) -> Any:
        if (usual := names.one_name(name)) != name:
            return find(usual)
        (parent, _, last), row, found = name.rpartition("."), table.get(name, "use:"), []
        rows = [each.removeprefix(f"{name}.").partition(".")[0] for each in table if each.startswith(f"{name}.")]
        places = [] if row.startswith("use:") else row.split()
        for place in places:
            with contextlib.suppress(ModuleNotFoundError):  # tf-slim
                found.append(pkgutil.resolve_name(place))
        if row.startswith("use:"):
            if not isinstance(owner := find(parent), View):
                return owner
            found = [getattr(each, last) for each in owner._modules if hasattr(each, last)]
            with contextlib.suppress(ModuleNotFoundError):
                home = re.match(r"\w+", table["keras"])[0]  # type: ignore[index]
                found = found or [importlib.import_module(re.sub(r"^keras\b", home, name))]
        if not found and row and not rows and parent != "tensorflow.contrib":  # a module may be imported and not used
            above = [table.get(each, "") for each in itertools.accumulate(name.split("."), "{}.{}".format)]
            advice = next((each for each in reversed(above) if each.startswith("use:")), "use: none that is known")
            raise NoSuchName(f"{name} is not there. Replacement:{advice.removeprefix('use:')}.")
        if len(places) < 2:  # of several each has names of this one, also if it is no module
            if found and not isinstance(found[0], types.ModuleType):
                return found[0]
            found = [each for each in found if isinstance(each, types.ModuleType)]
        if name.startswith("tensorflow.python."):  # names have moved between these and the public ones
            found.append(importlib.import_module("tensorflow.compat.v1"))
        return View(name, find, found, rows)

    return find


def install(find: Callable[[str], Any]) -> None:
    """From now on, makes imports in the program's files, and in no others, give what `find` finds."""
    original = builtins.__import__

    @functools.wraps(original)
    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        root = name.partition(".")[0]
        if level or root not in names.ROOTS or not source.is_of_program((globals or {}).get("__file__")):
            return original(name, globals, locals, fromlist, level)
        try:
            module = find(name)
            if not isinstance(module, View):  # a function that has its module's name: arg_scope
                module = find(name.rpartition(".")[0])
            for each in set(fromlist or ()) - {"*"}:
                getattr(module, each)
        except NoSuchName as error:
            raise NoSuchModule(str(error)) from None
        return module if fromlist else find(root)

    by_name = importlib.import_module

    @functools.wraps(by_name)
    def importing_by_name(name, package=None):
        asking = sys._getframe(1).f_globals.get("__file__")
        if name.partition(".")[0] not in names.ROOTS or not source.is_of_program(asking):
            return by_name(name, package)
        if isinstance(module := find(name), View):
            return module
        raise ModuleNotFoundError(f"{name} is no module.")

    builtins.__import__, importlib.import_module = importing, importing_by_name


def prepare_machine(num_shown_gpus: int) -> None:
    """Prepares this process for a program; num_shown_gpus: GPUs that it is told of if there is none."""
    compat.keep_queues_on_host()
    compat.open_sessions_by(_configuration)
    if num_shown_gpus:
        compat.show_gpus(num_shown_gpus)
    np.set_printoptions(legacy="1.25")  # prints 0.5, not np.float64(0.5)
    for name, value in names.OF_NUMPY.items():
        vars(np).setdefault(name, value)


def _configuration(target: str, graph: tf.Graph, config) -> tuple:
    """Lets a session open among Horovod's workers, and run on the CPU what is placed on GPUs if there are none."""
    config = config or tf.compat.v1.ConfigProto()
    if program.is_initialized():
        from tower_train.fronts.tf_estimator.workers import merged

        target, config = target or program.current().target, merged(program.current().session_config, config)
    if not tf.config.list_physical_devices("GPU"):  # asked late: a program may set CUDA_VISIBLE_DEVICES first
        config.allow_soft_placement = True
        if any("GPU" in op.device.upper() for op in graph.get_operations()):
            _tell_once("There is no GPU here: what this program places on GPUs runs on the CPU.")
    return target, config
