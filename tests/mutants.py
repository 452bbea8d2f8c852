"""Mutation testing: makes small semantic bugs, one at a time, and runs the fitting tests on each.

    python tests/mutants.py tower_train/graph --count=40 --seed=1

Works in a copy of the repository. The tests of the room, and of rooms that use it much, run once without a bug, to
learn which of them execute each line; then each mutant meets those of its line, the fastest first, until one fails.
A survivor is printed with its line, to be given a test, or to be shown equal to the program.
"""

import argparse
import ast
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import coverage
import keras  # noqa: F401
import pytest
import tensorflow  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
_MOST_SECS, _MOST_FOLDER_SECS = 300, 1800  # of the tests of a line; of whole folders of tests
_USED_BY = {"data": ["workloads"], "graph": ["run", "cluster"], "inference": ["run", "graph"], "cluster": ["run"],
            "run": ["run_dir", "cluster"], "run_dir": ["run", "inference"]}  # fmt: skip
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
            case ast.Call(_, _, [*_, word]) if word.arg not in (None, "strict"):  # zip's lists are of one length
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


def test_folders(path: pathlib.Path) -> list[str]:
    """Returns the folder of the tests of a module's room, and those that use the room much."""
    room = next((part for part in path.parent.parts if (ROOT / "tests" / part).is_dir()), "")
    return [f"tests/{each}" for each in (room, *_USED_BY.get(room, ()))]


class Lines:
    """A plugin of pytest that notes which tests execute which lines of the package, and how long each test takes."""

    def __init__(self, copy: pathlib.Path):
        self.coverage = coverage.Coverage(data_file=None, include=[f"{copy}/tower_train/*"])
        self.copy = copy
        self.secs = collections.defaultdict(float)  # of each test
        self.failed = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        self.coverage.switch_context(item.location[0])  # what a file's first test sets up may serve all of them
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report):
        self.secs[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def tests(self) -> dict[str, dict[int, list[str]]]:
        """Returns the tests that pass, the fastest first, by module and line."""
        data = self.coverage.get_data()
        of_file = collections.defaultdict(list)
        for test in sorted(set(self.secs) - self.failed, key=self.secs.get):
            of_file[test.split("::")[0]].append(test)

        def each(contexts: list[str]) -> list[str]:
            tests = {test for name in contexts for test in ([name] if "::" in name else of_file[name])}
            return sorted(tests & set(self.secs) - self.failed, key=self.secs.get)

        return {
            str(pathlib.Path(file).relative_to(self.copy)): {
                line: each(names) for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }


def in_fork(copy: pathlib.Path, work: Callable[[], int], most_secs: float) -> int | None:
    """Returns the status of work in the copy, None if it took too long. A fork need not import TensorFlow again."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        os._exit(work())
    deadline, status = time.monotonic() + most_secs, None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def tests_of_lines(copy: pathlib.Path, folders: list[str]) -> dict[str, dict[int, list[str]]]:
    """Runs folders of tests once, and returns those that execute each line (Lines.tests)."""
    notes = copy / "lines.json"

    def work() -> int:
        lines = Lines(copy)
        lines.coverage.start()
        pytest.main(["-q", "-q", "-p", "no:xdist", *folders], plugins=[lines])
        lines.coverage.stop()
        notes.write_text(json.dumps(lines.tests()))
        return 0

    if in_fork(copy, work, _MOST_FOLDER_SECS) != 0:
        raise SystemExit(f"{' '.join(folders)}: more than {_MOST_FOLDER_SECS} s without any mutant.")
    return {
        module: {int(line): names for line, names in lines.items()}
        for module, lines in json.loads(notes.read_text()).items()
    }


def passes(copy: pathlib.Path, *tests: str) -> bool:
    """Returns whether tests pass, in time, in the copy."""
    words = ["-x", "-q", "-q", "-p", "no:xdist", *tests]
    return in_fork(copy, lambda: pytest.main(words), _MOST_SECS) in (0, 5)  # 5: there was no test


def is_caught(copy: pathlib.Path, mutant: Mutant, lines: dict[int, list[str]]) -> bool:
    """Returns whether a test fails on the mutant that passes without it, asked at once, as a busy machine fails too.

    The tests that execute the line run, of the room and then of others; where there is none, as other processes
    execute it, all of the room.
    """
    original = (copy / mutant.path).read_bytes()
    room, *_ = test_folders(mutant.path)
    near = [test for test in lines.get(mutant.line, ()) if test.startswith(f"{room}/")]
    far = [test for test in lines.get(mutant.line, ()) if test not in near]
    for tests in filter(None, (near, far) if near or far else ([room],)):
        (copy / mutant.path).write_bytes(changed(mutant))
        shutil.rmtree(copy / ".pytest_cache", ignore_errors=True)
        failed = not passes(copy, *tests)
        (copy / mutant.path).write_bytes(original)
        last = copy / ".pytest_cache/v/cache/lastfailed"
        names = list(json.loads(last.read_text())) if last.exists() else tests  # none fails where time ran out
        if failed and passes(copy, *names):
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
        folders = {folder for mutant in chosen for folder in test_folders(mutant.path)}
        lines = {} if args.list else tests_of_lines(copy, sorted(folders))
        for number, mutant in enumerate(chosen, 1):
            caught = args.list or is_caught(copy, mutant, lines.get(str(mutant.path), {}))
            survivors += [] if caught else [mutant]
            print(f"{number} {'' if args.list else 'caught ' if caught else 'SURVIVED '}{mutant}", flush=True)
    if not args.list:
        print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught. Survivors:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
