"""The modules that a program, and it alone, gets from `import tensorflow`, `import keras` and `import horovod`."""

import builtins
import contextlib
import functools
import importlib
import importlib.util
import operator
import pathlib
import re
import sys
import sysconfig
import types
from typing import Any

from tower_train import errors
from tower_train.fronts import compat
from tower_train.fronts.tf1 import names


class NoSuchName(errors.ConfigError, AttributeError):
    """A name of TensorFlow 1 that is not there."""


class NoSuchModule(errors.ConfigError, ImportError):
    """The same in an import."""


class Names:
    """The names of TensorFlow 1, Keras and Horovod as a program sees them; uses_keras_3: as names.table has it."""

    def __init__(self, uses_keras_3: bool):
        compat.restore_names_for_slim()
        self.table = names.table(uses_keras_3)
        self.home_of_keras = self.table["keras"].split()[0].partition(".")[0]
        self.find = functools.cache(self._find)

    def _find(self, name: str) -> Any:
        """Returns what a dotted name means, an object for its attributes too; NoSuchName if nothing."""
        if (usual := names.one_name(name)) != name:
            return self.find(usual)
        (parent, _, last), row = name.rpartition("."), self.table.get(name, "use:")
        if not row.startswith("use:"):
            has_slim = importlib.util.find_spec("tf_slim")
            found = [_resolved(place) for place in row.split() if has_slim or not place.startswith("tf_slim")]
            if row and not found:
                raise NoSuchName(f"{name} needs tf-slim{_line_of_program()}: pip install 'tower_train[tf1]'.")
        else:
            owner = self.find(parent)
            if not isinstance(owner, View):
                return owner  # what an object has is its own
            found = [getattr(each, last) for each in owner.modules if hasattr(each, last)]
            with contextlib.suppress(ModuleNotFoundError):
                found = found or [importlib.import_module(re.sub(r"^keras\b", self.home_of_keras, name))]
            is_module = parent == "tensorflow.contrib" or any(each.startswith(f"{name}.") for each in self.table)
            if not found and not is_module:  # modules are imported, and not always used
                raise NoSuchName(f"{name} is not there{_line_of_program()}. {names.advice(name)}")
        if found and not isinstance(found[0], types.ModuleType):
            return found[0]
        modules = [each for each in found if isinstance(each, types.ModuleType)]
        if name.startswith("tensorflow.python."):  # names have moved between these and the public ones
            modules.append(importlib.import_module("tensorflow.compat.v1"))
        return View(name, self, modules)

    def install(self) -> None:
        """Makes imports of the program's files, and of no others, give these names from now on."""
        original = builtins.__import__

        @functools.wraps(original)
        def importing(name, globals=None, locals=None, fromlist=(), level=0):
            root = name.partition(".")[0]
            if level or root not in self.table or not _is_of_program((globals or {}).get("__file__")):
                return original(name, globals, locals, fromlist, level)
            try:
                module = self.find(name)
                if not isinstance(module, View):  # a function that has its module's name: arg_scope
                    module = self.find(name.rpartition(".")[0])
                for each in set(fromlist or ()) - {"*"}:
                    getattr(module, each)
            except NoSuchName as error:
                raise NoSuchModule(str(error)) from None
            return module if fromlist else self.find(root)

        builtins.__import__ = importing


install_once = functools.cache(lambda: Names(uses_keras_3=False).install())


class View(types.ModuleType):
    """A module of TensorFlow 1: looks its names up when they are used, in the modules that have them today."""

    def __init__(self, name: str, names_: Names, modules: list[types.ModuleType]):
        super().__init__(name)
        vars(self).update(__path__=[], _names=names_, modules=modules)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from it import *`
            rows = [re.fullmatch(rf"{self.__name__}\.(\w+).*", row) for row in self._names.table]
            of_table = [each[1] for each in rows if each and hasattr(self, each[1])]
            return sorted({each for each in [*of_table, *dir(self)] if not each.startswith("_")})
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return self._names.find(f"{self.__name__}.{name}")

    def __dir__(self):
        return sorted({each for module in self.modules for each in dir(module)})


def _resolved(place: str) -> Any:
    """Returns what stands at "module" or "module:attribute"."""
    module, _, attribute = place.partition(":")
    home = importlib.import_module(module)
    return operator.attrgetter(attribute)(home) if attribute else home


@functools.cache
def _is_of_program(file: str | None) -> bool:
    """Returns whether a file is the program's or beside it: no installed package, Python's own or ours."""
    others = [pathlib.Path(__file__).parents[2], pathlib.Path(sysconfig.get_path("stdlib"))]
    others += [pathlib.Path(each) for each in sys.path if each and any(pathlib.Path(each).glob("*.dist-info"))]
    here = pathlib.Path(file or "<none>").resolve()
    return here.is_file() and not any(here.is_relative_to(each.resolve()) for each in others)


def _line_of_program() -> str:
    """Returns " (FILE:LINE)" of the program's line that runs now, for a message."""
    frame = sys._getframe(1)
    while frame and not _is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
