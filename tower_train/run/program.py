"""The import path of the workload of the running program."""

import os
import pathlib
import sys

from tower_train.workload import Workload


def import_path(workload: Workload) -> str | None:
    """Returns the path by which workload.load finds this very record, in a module or in the running program: 'module'
    (its WORKLOAD) or 'module:NAME'; None if it is no module's, or if importing the program would run it."""
    main = sys.modules["__main__"]  # which may be there under other names too
    modules = sorted(sys.modules.items(), key=lambda item: item[1] is main)
    for module_name, module in modules:
        attributes = getattr(module, "__dict__", {})
        if id(workload) not in map(id, attributes.values()):  # of all there are: in Python it took a tenth of a second
            continue
        names = [name for name, value in attributes.items() if value is workload]
        found = _main_name() if module is main else module_name
        return found and (found if "WORKLOAD" in names else f"{found}:{names[0]}")
    return None


def python_path(path: str) -> str | None:
    """Returns the directory that PYTHONPATH must have for the running program's import path to work here, or None."""
    if path.partition(":")[0] != _main_name() or sys.modules["__main__"].__spec__:
        return None
    folder = os.path.dirname(os.path.abspath(sys.modules["__main__"].__file__))
    known = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return None if folder in map(os.path.abspath, known) else os.path.relpath(folder)


def _main_name() -> str | None:
    """Returns the name by which the program can be imported without being run; None if there is none."""
    main = sys.modules["__main__"]
    if main.__spec__:  # python -m
        return main.__spec__.name
    try:
        path = pathlib.Path(main.__file__)
        is_guarded = "__main__" in path.read_text()
    except (AttributeError, OSError, UnicodeDecodeError):
        return None
    return path.stem if path.suffix == ".py" and path.stem.isidentifier() and is_guarded else None
