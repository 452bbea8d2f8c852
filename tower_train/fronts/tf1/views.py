"""The modules that a program, and it alone, gets from `import tensorflow`, `import keras` and `import horovod`."""

import builtins
import functools
import importlib
import operator
import pathlib
import sys
import sysconfig
import types
from typing import Any

from tower_train import errors
from tower_train.fronts.tf1 import names

_ROOTS = ("tensorflow", "keras", "horovod")
_TENSORFLOWS = ("tensorflow.python", "tensorflow.core", "tensorflow.tools", "tensorflow.compiler", "tensorflow.lite")


class NoSuchName(errors.ConfigError, AttributeError):
    """A name of TensorFlow 1 that is not there."""


class NoSuchModule(errors.ConfigError, ImportError):
    """The same in an import."""


class Names:
    """The names of TensorFlow 1, Keras and Horovod as a program sees them.

    Args:
      of_keras_3: whether the program is one of Keras without sessions, which keeps today's Keras.
    """

    def __init__(self, of_keras_3: bool):
        self._modules = names.MODULES | (names.MODULES_OF_KERAS_3 if of_keras_3 else {})
        self._names = names.NAMES | (names.NAMES_OF_KERAS_3 if of_keras_3 else {})
        self._views: dict[str, View] = {}

    def find(self, name: str) -> Any:
        """Returns what a dotted name means; NoSuchName if nothing."""
        name = names.one_name(name)
        if name in self._names:
            return self._seen(name, _resolved(self._names[name]))
        if name in self._modules:
            return self._view(name, self._modules[name])
        parent, _, last = name.rpartition(".")
        if name.startswith(_TENSORFLOWS):
            try:
                return self._view(name, [importlib.import_module(name), "tensorflow.compat.v1"])  # names have moved
            except ModuleNotFoundError:
                pass
        owner = self.find(parent) if parent else None
        modules = owner.modules() if isinstance(owner, View) else [owner]
        found = [value for module in modules if (value := getattr(module, last, self)) is not self]
        if found:
            is_module = isinstance(found[0], types.ModuleType)
            return (
                self._view(name, [each for each in found if isinstance(each, types.ModuleType)])
                if is_module
                else found[0]
            )
        raise NoSuchName(f"{name} is not there{_line_of_program()}. Use instead: {names.replacement_of(name)}.")

    def why_missing(self, name: str) -> str | None:
        """Returns why a dotted name, of which the last parts may be attributes of objects, is not there; or None."""
        root, *parts = names.one_name(name).split(".")
        try:
            value = self.find(root)
            for part in parts:
                if not isinstance(value, View):
                    return None
                value = getattr(value, part)
        except errors.ConfigError as error:
            return str(error)
        return None

    def _seen(self, name: str, value: Any) -> Any:
        has_module = isinstance(value, types.ModuleType) and not isinstance(value, View)
        return self._view(name, [value]) if has_module else value

    def _view(self, name: str, modules: list) -> "View":
        if name not in self._views:
            self._views[name] = View(name, self, modules)
        return self._views[name]

    def install(self) -> None:
        """Makes imports of the program's files, and of no others, give these names from now on."""
        original = builtins.__import__

        @functools.wraps(original)
        def importing(name, globals=None, locals=None, fromlist=(), level=0):
            root = name.partition(".")[0]
            if level or root not in _ROOTS or not _is_of_program((globals or {}).get("__file__")):
                return original(name, globals, locals, fromlist, level)
            try:
                module = self.find(name)
                for each in fromlist or ():
                    if each != "*":
                        getattr(module, each)
            except NoSuchName as error:
                raise NoSuchModule(str(error)) from None
            return module if fromlist else self.find(root)

        builtins.__import__ = importing


class View(types.ModuleType):
    """A module of TensorFlow 1: looks its names up when they are used."""

    def __init__(self, name: str, names_: Names, modules: list):
        super().__init__(name)
        vars(self).update(__path__=[], _names=names_, _modules=modules)

    def modules(self) -> list[types.ModuleType]:  # no property: an AttributeError in it would come back here
        return [_resolved(module) if isinstance(module, str) else module for module in self._modules]

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from it import *`
            return [each for each in dir(self) if not each.startswith("_")]
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return self._names.find(f"{self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        return sorted({each for module in self.modules() for each in dir(module)})


def _resolved(place: str) -> Any:
    """Returns what stands at "module" or "module:attribute"."""
    module, _, attribute = place.partition(":")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "tf_slim":
            raise
        raise errors.ConfigError(
            f"tf.contrib's layers need the package tf-slim{_line_of_program()}: pip install 'tower_train[tf1]'."
        ) from None
    return operator.attrgetter(attribute)(home) if attribute else home


@functools.cache
def _is_of_program(file: str | None) -> bool:
    """Returns whether a file is the program's or beside it: no installed package, Python's own or ours."""
    if file is None or file.startswith("<"):
        return False
    path = pathlib.Path(file).resolve()
    others = [pathlib.Path(__file__).parents[2], *(pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib",))]
    others += [pathlib.Path(each) for each in sys.path if each and any(pathlib.Path(each).glob("*.dist-info"))]
    return not any(path.is_relative_to(each.resolve()) for each in others)


def _line_of_program() -> str:
    """Returns " (FILE:LINE)" of the program's line that runs now, for a message."""
    frame = sys._getframe(1)
    while frame and not _is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
