"""Mutation testing: makes small semantic bugs, one at a time, and runs the fitting tests on each.

    python tests/mutants.py tower_train/graph --count=40 --seed=1

Works in a copy of the repository. First the tests that name the module run, then, on what survives, all of its room.
A survivor is printed with its line, to be given a test, or to be shown equal to the program.
"""

import argparse
import ast
import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras  # noqa: F401
import pytest
import tensorflow  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
_MOST_FILES, _MOST_SECS = 5, 400  # of the fitting tests; of one run of them
_BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}
_COMPARISON = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
               ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
_NAMES = {"reduce_mean": "reduce_sum", "reduce_sum": "reduce_mean", "minimum": "maximum",
          "maximum": "minimum", "min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "all": "any",
          "any": "all", "assign_add": "assign_sub", "float64": "float32"}  # fmt: skip
_SAYS = ("say", "notice", "print")  # calls that only speak to people


class Mutant(NamedTuple):
    """A change of a module: its path below the root, the line, and the old and the new text of a span of bytes."""

    path: pathlib.Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {' '.join(self.old.split())[:60]!r} -> {self.new[:60]!r}"


def mutants_of(path: pathlib.Path) -> Iterator[Mutant]:
    """Yields all mutants of a module, but for those of messages, annotations and constants of the module."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutant(first: ast.AST, new: str, last: ast.AST | None = None) -> Mutant:
        begin = starts[first.lineno - 1] + first.col_offset
        end = starts[(last or first).end_lineno - 1] + (last or first).end_col_offset
        return Mutant(path, first.lineno, begin, end, source[begin:end].decode(), new)

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source.decode(), node)

    for node in _nodes(ast.parse(source)):
        match node:
            case ast.BinOp(left, op, right) if type(op) in _BINARY and not isinstance(
                left, ast.Constant | ast.JoinedStr
            ):
                yield mutant(node, f"({text(left)} {_BINARY[type(op)]} {text(right)})")
            case ast.Compare(left, [op], [right]):
                yield mutant(node, f"({text(left)} {_COMPARISON[type(op)]} {text(right)})")
            case ast.BoolOp(op, [first, *_, last]):
                yield mutant(node, f"({text(first)})")
                yield mutant(node, f"({text(last)})")
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                yield mutant(test, f"(not ({text(test)}))")
            case ast.Attribute(value, name) if name in _NAMES:
                yield mutant(node, f"{text(value)}.{_NAMES[name]}")
            case ast.Name(name, ast.Load()) if name in _NAMES:
                yield mutant(node, _NAMES[name])
            case ast.Expr(ast.Call()):
                yield mutant(node, "pass")
            case ast.Subscript(_, ast.Slice(lower, upper)):
                for bound in filter(None, (lower, upper)):
                    yield mutant(bound, f"({text(bound)} + 1)")
            case ast.Call(ast.Attribute(_, "control_dependencies"), [waited]):
                yield mutant(waited, "[]")
            case ast.Call(ast.Name("reversed" | "sorted"), [values, *_]):
                yield mutant(node, f"list({text(values)})")
            case ast.Call(_, _, [_, *_]) if not any(word.arg is None for word in node.keywords):
                word = node.keywords[-1]
                yield mutant(
                    word.value, "None" if isinstance(word.value, ast.Constant) else f"type({text(word.value)})()"
                )
            case ast.Return(ast.Constant(bool() as value)):
                yield mutant(node.value, str(not value))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes within functions, in order, without messages and annotations."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(tree, ast.Module) and not isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arg | ast.AnnAssign):
            continue
        if isinstance(child, ast.Call) and (getattr(child.func, "id", "") in _SAYS):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call) and text_of(child.value.func) in _SAYS:
            continue
        if child in getattr(tree, "decorator_list", ()) or child is getattr(tree, "returns", None):
            continue
        yield child
        yield from _nodes(child)


def text_of(function: ast.AST) -> str:
    """Returns the last name of what is called."""
    return getattr(function, "id", getattr(function, "attr", ""))


def changed(mutant: Mutant) -> bytes:
    """Returns the module with the mutant's change."""
    source = (ROOT / mutant.path).read_bytes()
    return source[: mutant.start] + mutant.new.encode() + source[mutant.end :]


def _compiles(mutant: Mutant) -> bool:
    try:
        return bool(compile(changed(mutant), str(mutant.path), "exec"))
    except SyntaxError:
        return False


def fitting_tests(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the test files that name a module, at most some, its own first; and the folder of its room's tests."""
    room, name = path.parent.name, path.stem
    package = ".".join(path.parent.parts)
    imports = re.compile(rf"from {re.escape(package)} import [^\n]*\b{name}\b|{re.escape(package)}\.{name}\b")
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "tests").rglob("test_*.py"))]
    near = [file for file in files if imports.search((ROOT / file).read_text())]
    near.sort(key=lambda file: (file.stem != f"test_{name}", file.parent.name != room, str(file)))
    folder = next(
        (f"tests/{part}" for part in reversed(path.parent.parts) if (ROOT / "tests" / part).is_dir()), "tests"
    )
    return list(map(str, near[:_MOST_FILES])), [folder]


def passes(copy: pathlib.Path, tests: Sequence[str]) -> bool:
    """Returns whether tests pass, in time, in the copy: in a fork of this process, which has imported TensorFlow."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        os._exit(pytest.main(["-x", "-q", "-q", "-p", "no:xdist", *tests]))
    deadline, status = time.monotonic() + _MOST_SECS, None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status in (0, 5)  # 5: there was no test


def is_caught(copy: pathlib.Path, mutant: Mutant) -> bool:
    """Returns whether a test fails on the mutant that passes without it, asked at once, as a busy machine fails too."""
    original = (copy / mutant.path).read_bytes()
    for tests in filter(None, fitting_tests(mutant.path)):
        (copy / mutant.path).write_bytes(changed(mutant))
        failed = not passes(copy, tests)
        (copy / mutant.path).write_bytes(original)
        if failed and passes(copy, ["--last-failed", "--last-failed-no-failures=none", *tests]):
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="modules, or folders of them, such as tower_train/graph")
    parser.add_argument("--count", type=int, default=20, help="mutants, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--list", action="store_true", help="print the chosen mutants, and run nothing")
    args = parser.parse_args()
    modules = [
        file
        for path in args.paths
        for file in sorted([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    every = [mutant for module in modules for mutant in mutants_of(module.relative_to(ROOT)) if _compiles(mutant)]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = pathlib.Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        for number, mutant in enumerate(chosen, 1):
            caught = args.list or is_caught(copy, mutant)
            survivors += [] if caught else [mutant]
            print(f"{number} {'' if args.list else 'caught ' if caught else 'SURVIVED '}{mutant}", flush=True)
    if not args.list:
        print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught. Survivors:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
