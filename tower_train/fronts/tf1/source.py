"""A program's files, read without running them: the names that it uses, and what its towers go through."""

import ast
import dataclasses
import pathlib

from tower_train import errors

_ROOTS = ("tensorflow", "keras", "horovod")
# Names that only programs with graphs and sessions use; one of Keras that has none of them keeps today's Keras.
_OF_GRAPHS = {
    "Session", "InteractiveSession", "ConfigProto", "GPUOptions", "get_session", "set_session", "placeholder",
    "contrib", "MonitoredTrainingSession", "get_variable", "estimator", "get_default_graph", "flags", "horovod",
    "train", "disable_eager_execution",
}  # fmt: skip
FRONTS = {  # {a name in a program: what its towers go through}
    "multi_gpu_model": "keras.utils.multi_gpu_model, by tower_train.multi_gpu_model",
    "MirroredStrategy": "an Estimator with a strategy, by the towers of tower_train.estimator",
    "horovod": "Horovod's workers, by tower_train.horovod",
    "estimator": "an Estimator, by tower_train.estimator; RunConfig(num_gpus=N) gives it towers",
    "average_gradients": "a loop over towers of its own, which is kept as it is",
}


@dataclasses.dataclass(frozen=True)
class Use:
    """A dotted name in a file of the program."""

    name: str  # from its root, such as tensorflow.contrib.slim
    place: str  # FILE:LINE


@dataclasses.dataclass(frozen=True)
class Source:
    """The names in a program's files."""

    uses: list[Use]
    words: set[str]  # all names and short texts in them

    @property
    def is_of_keras_3(self) -> bool:
        """Whether this is a program of Keras without sessions."""
        roots = {use.name.partition(".")[0] for use in self.uses}
        parts = {part for use in self.uses for part in use.name.split(".")}
        return "keras" in roots and not _OF_GRAPHS & parts

    @property
    def front(self) -> str | None:
        parts = self.words | {part for use in self.uses for part in use.name.split(".")}
        return next((text for name, text in FRONTS.items() if name in parts), None)


def read(path: str) -> Source:
    """Reads a program and the files beside it that it imports; ConfigError for one that is not Python 3."""
    uses, words, to_read, seen = [], set(), [pathlib.Path(path)], set()
    while to_read:
        file = to_read.pop()
        if file in seen:
            continue
        seen.add(file)
        names = _Names(file)
        uses += names.uses
        words |= names.words
        for module in names.imported:
            place = pathlib.Path(path).parent.joinpath(*module.split("."))
            to_read += [each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()]
    return Source(uses, words)


class _Names(ast.NodeVisitor):
    """The names in one file, in the order of their lines."""

    def __init__(self, file: pathlib.Path):
        self.uses, self.words, self.imported = [], set(), set()
        self._file, self._meanings = file, {}
        try:
            self.visit(ast.parse(file.read_bytes(), str(file)))
        except OSError as error:
            raise errors.ConfigError(f"{file}: cannot be read: {error.strerror}.") from None
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            raise errors.ConfigError(
                f"{file}:{line} is not Python 3: {error}. If it is Python 2, convert it first: 2to3 -w {file}"
            ) from None

    def _use(self, name: str, node: ast.AST) -> None:
        if name.partition(".")[0] in _ROOTS:
            self.uses.append(Use(name, f"{self._file}:{node.lineno}"))

    def visit_Import(self, node):  # noqa: N802
        for alias in node.names:
            self.imported.add(alias.name)
            self._meanings[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self._use(alias.name, node)

    def visit_ImportFrom(self, node):  # noqa: N802
        module = node.module or ""
        self.imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        for alias in node.names if not node.level else ():
            name = module if alias.name == "*" else f"{module}.{alias.name}"
            self._meanings[alias.asname or alias.name] = name
            self._use(name, node)

    def visit_Assign(self, node):  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.value, ast.Attribute) and (name := self._dotted(node.value)):
            self._meanings |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}

    def visit_Attribute(self, node):  # noqa: N802
        if name := self._dotted(node):
            self._use(name, node)
        else:
            self.words.add(node.attr)
            self.generic_visit(node)

    def visit_FunctionDef(self, node):  # noqa: N802
        self.words.add(node.name)
        self.generic_visit(node)

    def visit_Name(self, node):  # noqa: N802
        self.words.add(node.id)

    def visit_Constant(self, node):  # noqa: N802
        if isinstance(node.value, str):
            self.words.add(node.value)

    def _dotted(self, node: ast.AST) -> str | None:
        """Returns the dotted name that an expression means, from an import on; None if it is none."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._meanings:
            return None
        return ".".join([self._meanings[node.id], *reversed(parts)])
