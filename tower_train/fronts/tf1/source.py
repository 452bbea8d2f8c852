"""A program's files, read without running them: the names that it uses, and what its towers go through."""

import ast
import functools
import importlib.util
import os
import pathlib
import re
import sys
import sysconfig

from tower_train import errors
from tower_train.fronts.tf1 import names

# Parts of names of Keras and others by which a program has graphs and sessions.
_OF_GRAPHS = set(
    "get_session set_session placeholder horovod train estimator backend.function gradients learning_phase "
    "set_learning_phase".split()
)
# Parts of tensorflow, not there today, that also programs of Keras without graphs use.
_OF_NO_GRAPHS = set(
    "keras losses metrics optimizers initializers logging gfile set_random_seed python examples".split()
)
_OF_PYTHON_2 = set("execfile raw_input reduce xrange".split())  # not unicode, which programs for both ask for
_FRONTS = {  # {a word in a program: what its towers go through}
    "multi_gpu_model": "keras.utils.multi_gpu_model: tower_train's for a Keras 3 model, the published one for Keras 2",
    "MirroredStrategy": "an Estimator with a strategy, by the towers of tower_train.estimator",
    "horovod": "Horovod's workers, by tower_train.horovod",
    "Estimator": "an Estimator, by tower_train.estimator; RunConfig(num_gpus=N) gives it towers",
    **dict.fromkeys(("average_gradients", "num_gpus", "num_clones"), "a loop of its own, which is kept as it is"),
}


class Program:
    """The names in a program and in the files that it imports; ConfigError if one is not Python 3."""

    def __init__(self, path: str):
        # [(a dotted name from its root on, such as tensorflow.contrib.slim; FILE:LINE)]
        self.uses: list[tuple[str, str]] = []
        self.of_python_2: list[tuple[str, str]] = []  # [(a name that only Python 2 has; FILE:LINE)]
        self.words: set[str] = set()  # all words of its files
        self.has_tensors = False  # outside of layers: of an iterator, or of a model's add_loss
        files = [pathlib.Path(path)]
        self.folder = self.top = files[0].absolute().parent
        while (self.top / "__init__.py").exists():  # where its package is, if it is part of one
            self.top = self.top.parent
        for file in files:
            for module in self._read(file):
                for folder in (self.folder, self.top, file.parent, *sys.path[1:]):
                    place = pathlib.Path(folder, *module.split("."))
                    there = (place.with_suffix(".py"), place / "__init__.py")
                    files += [each for each in there if is_of_program(each) and not any(map(each.samefile, files))]
        self.uses_keras = any(name.startswith("keras") for name, _ in self.uses)
        # a program of Keras without graphs keeps today's Keras
        graphs = self.has_tensors or any(map(_is_of_graphs, {name for name, _ in self.uses}))
        self.uses_keras_3 = self.uses_keras and not graphs
        self.front = next((text for name, text in _FRONTS.items() if name in self.words), "none that are known here")

    def _read(self, file: pathlib.Path) -> set[str]:
        """Adds a file's names; returns the modules that it imports."""
        try:
            text = file.read_bytes()
            nodes = list(ast.walk(ast.parse(text)))
        except OSError as error:
            raise errors.ConfigError(f"{file}: cannot be read: {error.strerror}.") from None
        except (SyntaxError, ValueError) as error:
            place, why = f"{file}:{getattr(error, 'lineno', None) or 1}", getattr(error, "msg", error)
            raise errors.ConfigError(
                f"{place} is not Python 3: {why}. If it is Python 2, convert it first: 2to3 -w {file} (of Python 3.12)"
            ) from None
        self.words |= set(re.findall(r"\w+", text.decode(errors="ignore")))
        self.has_tensors |= bool(re.search(rb"make_\w+_iterator\(|(?<!self)\.add_loss\(", text))
        imported, uses, meanings, kept = set(), [], {}, set()
        for node in nodes:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                module = getattr(node, "module", None)
                name = f"{module}.{alias.name}" if module else alias.name
                imported |= {module or name, name}
                if not getattr(node, "level", 0):
                    root = name if module or alias.asname else name.partition(".")[0]
                    meanings[alias.asname or (alias.name if module else root)] = root
                    uses.append((name.removesuffix(".*"), node))
        for node in nodes:  # a name that the file also binds to something else may mean that
            name = _dotted(node.value, meanings) if isinstance(node, ast.Assign) else None
            if name or (isinstance(node, ast.Assign) and ast.unparse(node.value) == "None"):  # after a failed import
                kept.update(node.targets)
                meanings |= {target.id: name for target in node.targets if name and isinstance(target, ast.Name)}
            elif isinstance(node, ast.arg) or (isinstance(getattr(node, "ctx", None), ast.Store) and node not in kept):
                meanings.pop(getattr(node, "id", getattr(node, "arg", None)), None)
        uses += [(_dotted(node, meanings) or "", node) for node in nodes if isinstance(node, ast.Attribute)]
        self.uses += [(name, f"{file}:{node.lineno}") for name, node in uses if name.partition(".")[0] in names.ROOTS]
        loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        bound = {getattr(node, "name", getattr(node, "arg", getattr(node, "id", None))) for node in {*nodes} - {*loads}}
        bound |= {node.asname for node in nodes if isinstance(node, ast.alias)}
        old = [node for node in loads if node.id in _OF_PYTHON_2 - bound]
        self.of_python_2 += [(node.id, f"{file}:{node.lineno}") for node in old]
        return imported


def _is_of_graphs(name: str) -> bool:
    """Returns whether only a program with graphs uses a name: functions of TensorFlow 1 take no tensors of Keras 3."""
    root, *parts = names.one_name(name).split(".")
    is_old = root == "tensorflow" and parts and parts[0] not in _names_of_tensorflow_2() | _OF_NO_GRAPHS
    return is_old or not _OF_GRAPHS.isdisjoint([*parts, ".".join(parts)])


@functools.cache
def _names_of_tensorflow_2() -> set[str]:
    # from its file, as importing it settles which Keras it has
    spec = importlib.util.find_spec("tensorflow")
    return set(re.findall(r"import (?:\w+ as )?(\w+)", pathlib.Path(spec.origin).read_text()))


@functools.cache
def is_of_program(file: str | os.PathLike | None) -> bool:
    """Returns whether a file is the program's or beside it: no installed package, Python's own or ours."""
    others = [pathlib.Path(__file__).parents[2], pathlib.Path(sysconfig.get_path("stdlib"))]
    others += [pathlib.Path(each) for each in sys.path if each and any(pathlib.Path(each).glob("*.dist-info"))]
    here = pathlib.Path(file or "<none>").resolve()
    return here.is_file() and not any(here.is_relative_to(each.resolve()) for each in others)


def _dotted(node: ast.AST, meanings: dict[str, str]) -> str | None:
    """Returns the dotted name that an expression means, from an import on; None if it is none."""
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, meanings)):
        return f"{owner}.{node.attr}"
    return meanings.get(node.id) if isinstance(node, ast.Name) else None
