"""A program's files, read without running them: the names that it uses, and what its towers go through."""

import ast
import dataclasses
import pathlib
import re

from tower_train import errors

_ROOTS = {"tensorflow", "keras", "horovod"}
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
# Names that only programs with graphs and sessions use; one of Keras that has none of them keeps today's Keras.
_OF_GRAPHS = {
    "Session", "InteractiveSession", "ConfigProto", "GPUOptions", "get_session", "set_session", "placeholder",
    "contrib", "MonitoredTrainingSession", "get_variable", "estimator", "get_default_graph", "flags", "horovod",
    "train", "disable_eager_execution",
}  # fmt: skip
_FRONTS = {  # {a word in a program: what its towers go through}
    "multi_gpu_model": "keras.utils.multi_gpu_model, by tower_train.multi_gpu_model",
    "MirroredStrategy": "an Estimator with a strategy, by the towers of tower_train.estimator",
    "horovod": "Horovod's workers, by tower_train.horovod",
    "Estimator": "an Estimator, by tower_train.estimator; RunConfig(num_gpus=N) gives it towers",
    **dict.fromkeys(("average_gradients", "num_gpus", "num_clones"), "a loop of its own, which is kept as it is"),
}


@dataclasses.dataclass
class Source:
    """The names in a program's files."""

    uses: list[tuple[str, str]]  # (a dotted name from its root on, such as tensorflow.contrib.slim; FILE:LINE)
    words: set[str]

    @property
    def uses_keras_3(self) -> bool:
        """Returns whether this is a program of Keras without sessions."""
        parts = {part for name, _ in self.uses for part in name.split(".")}
        return any(name.startswith("keras") for name, _ in self.uses) and not _OF_GRAPHS & parts

    @property
    def front(self) -> str:
        return next((text for name, text in _FRONTS.items() if name in self.words), "none that are known here")


def read(path: str) -> Source:
    """Reads a program and the files beside it that it imports; ConfigError for one that is not Python 3."""
    source, files = Source([], set()), [pathlib.Path(path)]
    for file in files:
        for module in _read(file, source):
            for folder in (files[0].parent, file.parent):
                place = folder.joinpath(*module.split("."))
                beside = (place.with_suffix(".py"), place / "__init__.py")
                files += [each for each in beside if each.is_file() and each not in files]
    return source


def _read(file: pathlib.Path, source: Source) -> set[str]:
    """Adds a file's names to source; returns the modules that it imports."""
    try:
        text = file.read_bytes()
        tree = ast.parse(text)
    except OSError as error:
        raise errors.ConfigError(f"{file}: cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        place, why = f"{file}:{getattr(error, 'lineno', None) or 1}", getattr(error, "msg", error)
        raise errors.ConfigError(
            f"{place} is not Python 3: {why}. If it is Python 2, convert it first: 2to3 -w {file} (of Python 3.12)"
        ) from None
    source.words |= set(re.findall(r"\w+", text.decode(errors="ignore")))
    imported, uses, scopes = set(), [], [(tree, {})]
    for scope, outer in scopes:
        nodes, meanings, kept = [*ast.iter_child_nodes(scope)], dict(outer), set()
        for node in nodes:  # which become more: all of this scope
            nodes += () if isinstance(node, _SCOPES) else ast.iter_child_nodes(node)
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                imported |= {module or name, name}
                if not getattr(node, "level", 0):
                    root = name if module or alias.asname else name.partition(".")[0]
                    meanings[alias.asname or (alias.name if module else root)] = root
                    uses.append((name.removesuffix(".*"), node))
        for node in nodes:
            if isinstance(node, ast.Assign) and (name := _dotted(node.value, meanings)):  # slim = tf.contrib.slim
                meanings |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}
                kept.update(node.targets)
            elif isinstance(node, ast.Assign) and getattr(node.value, "value", "") is None:  # after a failed import
                kept.update(node.targets)
            elif isinstance(getattr(node, "ctx", None), ast.Store) and node not in kept or isinstance(node, ast.arg):
                meanings.pop(getattr(node, "id", getattr(node, "arg", None)), None)
        for node in nodes:
            if isinstance(node, ast.Attribute) and (name := _dotted(node, meanings)):
                uses.append((name, node))
        scopes += [(node, meanings) for node in nodes if isinstance(node, _SCOPES)]
    source.uses += [(name, f"{file}:{node.lineno}") for name, node in uses if name.partition(".")[0] in _ROOTS]
    return imported


def _dotted(node: ast.AST, meanings: dict[str, str]) -> str | None:
    """Returns the dotted name that an expression means, from an import on; None if it is none."""
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, meanings)):
        return f"{owner}.{node.attr}"
    return meanings.get(node.id) if isinstance(node, ast.Name) else None
