"""The files that importing a workload would execute, found without executing any: nothing is imported from a run.

A run directory is data, from anybody. No TensorFlow here.
"""

import functools
import importlib.machinery
import os
import pathlib
import site
import sys
import sysconfig
from collections.abc import Iterator

_PACKAGE = pathlib.Path(__file__).parent
_OURS = (_PACKAGE, _PACKAGE.parent / "cifar10")
RUN_JSON = "run.json"  # makes a directory a run; tower_train/__init__.py, which may import nothing, has it too


def find(module_name: str) -> list[str | None]:
    """Returns the files of a module and the packages around it, outermost first; None for one without a file. Raises
    ModuleNotFoundError if there is no such module or package; its `name` says which."""
    found, full_name, path = [], "", None
    for part in module_name.split("."):
        full_name = f"{full_name}.{part}" if full_name else part
        if module := sys.modules.get(full_name):
            found.append(getattr(module, "__file__", None))
            path = getattr(module, "__path__", ())
            continue
        spec = _find_spec(part, path) if part.isidentifier() else None
        if spec is None:
            raise ModuleNotFoundError(name=full_name)
        found.append(spec.origin if spec.has_location else None)
        path = spec.submodule_search_locations or ()
    return found


def _find_spec(part: str, path) -> importlib.machinery.ModuleSpec | None:
    """Does as importlib.util.find_spec, without importing packages around the module. path: of the package; or None."""
    if path is not None:
        # By its last name alone, which does not look for the package in sys.modules.
        return importlib.machinery.PathFinder.find_spec(part, list(path))
    specs = (finder.find_spec(part, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, specs), None)


def comes_along(path: str) -> bool:
    """Returns whether the workload at an import path comes with the trainer."""
    try:
        return is_ours(find(path.partition(":")[0])[-1])
    except ModuleNotFoundError:
        return False


def is_ours(file: str | None) -> bool:
    """Returns whether a file comes with the trainer."""
    return file is not None and any(_is_same(folder, ours) for folder in _folders(file) for ours in _OURS)


def is_pythons(file: str | None) -> bool:
    """Returns whether a file is of Python's own library, or is built into it."""
    return file is None or _innermost(file, [*_installed(), *_library()]) in _library()


def run_of(file: str, train_dir: str | None) -> str | None:
    """Returns the run in which a file lies by any of its names, train_dir or another directory that holds a run; else
    None.

    Installed files, and the trainer itself, lie in no run, even if one was put around them.
    """
    for name in (os.path.abspath(file), os.path.realpath(file)):
        for folder in _folders(name):
            if any(_is_same(folder, safe) for safe in [*_installed(), *_library(), *map(str, _OURS)]):
                break
            if train_dir and _is_same(folder, train_dir):
                return os.path.abspath(train_dir)
            if os.path.exists(os.path.join(folder, RUN_JSON)):
                return folder
    return None


def leave_runs_out(train_dir: str | None) -> None:
    """Removes directories in runs from Python's search path, and adds the current one at its end if it is in none."""
    sys.path[:] = [entry for entry in sys.path if _is_project(entry) or not run_of(_inside(entry), train_dir)]
    here = [_is_same(entry or os.curdir, os.curdir) for entry in sys.path]
    if not any(here) and not run_of(_inside(""), train_dir):
        sys.path.append("")


def in_current_directory(module_name: str) -> str | None:
    """Returns the file or folder in the current directory for a module or its outermost package; None without one."""
    top = module_name.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) if top.isidentifier() else None
    return spec and (spec.origin or os.path.abspath(top))


def _inside(entry: str) -> str:
    """Returns the path of a file, which need not exist, in a directory of Python's search path."""
    return os.path.join(entry or os.curdir, "x")


def _is_project(entry: str) -> bool:
    """Returns whether the trainer itself is imported from a directory of Python's search path."""
    return _is_same(entry or os.curdir, str(_PACKAGE.parent))


def _folders(file: str) -> Iterator[str]:
    """Returns the folders around a file, innermost first."""
    return map(str, pathlib.Path(file).parents)


def _innermost(file: str, folders: list[str]) -> str | None:
    """Returns the innermost of these folders around a file, by its real name."""
    around = (folder for parent in _folders(os.path.realpath(file)) for folder in folders if _is_same(parent, folder))
    return next(around, None)


@functools.cache  # called for every folder around every entry of Python's path
def _installed() -> list[str]:
    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(),
            site.getusersitepackages()]  # fmt: skip


@functools.cache
def _library() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]


def _is_same(one: str, other) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False
