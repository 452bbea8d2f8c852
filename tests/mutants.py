"""Mutation testing: makes small semantic bugs, one at a time, and runs the fitting tests on each.

    python tests/mutants.py tower_train/graph --count=40 --seed=1

Works in two copies of the repository, one for each of two processes. The whole suite runs once without a bug, to learn
which tests execute each line; then each mutant meets those of its line, the fastest of its own package first, until one
fails. A survivor is printed with its line, to be given a test, or to be shown equal to the program.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
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
_PROCESSES = 2
_SUITE_SECS, _MUTANT_SECS = 3600, 600  # at most: of all tests, without a mutant; of a mutant's tests
_FAR_SECS = 120  # of tests of other packages for one mutant
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


def drawn(modules: list[pathlib.Path], count: int, seed: int) -> list[Mutant]:
    """Returns mutants by the smallest digests of their texts, so that a change elsewhere leaves the choice as it is."""
    digests, seen = {}, collections.Counter()
    for mutant in filter(_compiles, itertools.chain.from_iterable(map(mutants_of, modules))):
        text = f"{seed} {mutant.path} {mutant.old} {mutant.new}"
        digests[mutant] = hashlib.sha256(f"{text} {seen[text]}".encode()).digest()
        seen[text] += 1
    return sorted(digests, key=digests.get)[:count]


class Lines:
    """A plugin of pytest that notes which tests execute which lines of the package, and how long each test takes."""

    def __init__(self):
        self.coverage = coverage.Coverage(data_file=None, include=[f"{_copy}/tower_train/*"])
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

    def tests(self, mutant: Mutant) -> dict[str, float]:
        """Returns the tests that execute a mutant's line and pass, with their seconds."""
        contexts = self.coverage.get_data().contexts_by_lineno(str(_copy / mutant.path)).get(mutant.line, ())
        secs = {test: secs for test, secs in self.secs.items() if test not in self.failed}
        return {test: secs[test] for test in secs if test in contexts or test.split("::")[0] in contexts}


_copy = ROOT  # of the repository, each process' own


def make_copy(folder: str) -> None:
    """Makes this process' copy of the repository in a folder."""
    global _copy
    _copy = pathlib.Path(folder) / str(os.getpid())
    shutil.copytree(ROOT, _copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))


def in_fork(work: Callable[[], int], most_secs: float) -> int | None:
    """Returns the status of work in the copy, None if it took too long. A fork need not import TensorFlow again."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(_copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(_copy)
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


def tests_of_lines(files: list[str], mutants: list[Mutant]) -> list[dict[str, float]]:
    """Runs files of tests once, and returns those that execute the line of each mutant, with their seconds."""

    def work() -> int:
        lines = Lines()
        lines.coverage.start()
        pytest.main(["-q", "-q", "-p", "no:xdist", *files], plugins=[lines])
        lines.coverage.stop()
        (_copy / "lines.json").write_text(json.dumps([lines.tests(mutant) for mutant in mutants]))
        return 0

    if in_fork(work, _SUITE_SECS) != 0:
        raise SystemExit(f"The tests took more than {_SUITE_SECS} s without any mutant.")
    return json.loads((_copy / "lines.json").read_text())


def passes(*tests: str) -> bool:
    """Returns whether tests pass, in time, in the copy."""
    words = ["-x", "-q", "-q", "-p", "no:xdist", *tests]
    return in_fork(lambda: pytest.main(words), _MUTANT_SECS) in (0, 5)  # 5: there was no test


def is_caught(mutant: Mutant, tests: dict[str, float]) -> bool:
    """Returns whether a test fails on the mutant that passes without it, asked at once, as a busy machine fails too.

    Args:
      mutant: the bug.
      tests: those that execute its line, with the seconds that each takes. If these pass all of the package run, as
        processes of theirs may execute it.
    """
    original = (_copy / mutant.path).read_bytes()
    package = next(
        (f"tests/{part}/" for part in mutant.path.parent.parts if (ROOT / "tests" / part).is_dir()), "tests/"
    )
    near = sorted((test for test in tests if test.startswith(package)), key=tests.get)
    far = sorted(tests.keys() - set(near), key=tests.get)
    secs = itertools.accumulate(map(tests.get, far))
    far = [test for test, until in zip(far, secs, strict=True) if until < _FAR_SECS]
    for group in filter(None, (near, far, [package])):
        (_copy / mutant.path).write_bytes(changed(mutant))
        shutil.rmtree(_copy / ".pytest_cache", ignore_errors=True)
        failed = not passes(*group)
        (_copy / mutant.path).write_bytes(original)
        last = _copy / ".pytest_cache/v/cache/lastfailed"
        names = list(json.loads(last.read_text())) if last.exists() else group  # none fails where time ran out
        if failed and passes(*names):
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="modules, or folders of them, such as tower_train/graph")
    parser.add_argument("--count", type=int, default=20, help="mutants, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    args = parser.parse_args()
    paths = [ROOT / path for path in args.paths]
    modules = [module for path in paths for module in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    mutants = drawn([module.relative_to(ROOT) for module in modules], args.count, args.seed)
    files = sorted(map(str, (ROOT / "tests").rglob("test_*.py")))
    with (
        tempfile.TemporaryDirectory(prefix="mutants") as folder,
        concurrent.futures.ProcessPoolExecutor(
            _PROCESSES, multiprocessing.get_context("fork"), make_copy, (folder,)
        ) as pool,
    ):
        parts = [[os.path.relpath(file, ROOT) for file in files[part::_PROCESSES]] for part in range(_PROCESSES)]
        known = zip(*pool.map(tests_of_lines, parts, itertools.repeat(mutants)), strict=True)
        asked = {
            pool.submit(is_caught, mutant, dict(collections.ChainMap(*each))): mutant
            for mutant, each in zip(mutants, known, strict=True)
        }
        survivors = []
        for number, answer in enumerate(concurrent.futures.as_completed(asked), 1):
            survivors += [] if answer.result() else [asked[answer]]
            print(f"{number} {'caught' if answer.result() else 'SURVIVED'} {asked[answer]}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught. Survivors:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
