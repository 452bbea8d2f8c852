"""Python processes for tests, forked from a server that has imported TensorFlow, which takes three seconds."""

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from multiprocessing import forkserver

SHARED = "TOWER_TRAIN_TESTS_FORK_SERVER"  # the address of the one that all processes of pytest-xdist use

NETWORK = "TOWER_TRAIN_TESTS_NETWORK"  # a process's environment variable with the path of its network namespace

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tensorflow"])


def share_server():
    """Starts the server that all processes started from now on use; it ends with this process."""
    _start_server()
    os.environ[SHARED] = forkserver._forkserver._forkserver_address


@functools.cache
def _start_server():
    """Without what TensorFlow writes to stderr when it is imported; or joins that of pytest-xdist's first process."""
    if SHARED in os.environ:
        server = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = os.environ[SHARED], os.pipe()[1]
        server.ensure_running = lambda: None
        return
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class Process:
    """`python -m module words...` or `python -c source words...`, with methods of subprocess.Popen that tests use."""

    def __init__(self, module, words, environment, stdout, stderr, cwd=None, stdin=os.devnull):
        """Starts it.

        Args:
          module: what to run; `-c` for a source, which is the first of the words; a path ending in `.py` for a program.
          words: its command line.
          environment: its environment, all of it.
          stdout, stderr: paths of the files that it writes to, or ends of pipes, as `pipe` makes them.
          cwd: its directory; this process's if None.
          stdin: the path of the file that it reads, or the end of a pipe.
        """
        _start_server()
        what = (module, words, dict(environment), (stdin, stdout, stderr), str(cwd or os.getcwd()))
        self._process = _context.Process(target=_run, args=what, daemon=True)
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            self._process.start()  # which would have it import the program that this one is
        finally:
            sys.modules["__main__"] = main
        self.pid = self._process.pid

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):  # has ended
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.poll()


def pipe():
    """Returns the ends of a pipe: to read from, to write to."""
    return _context.Pipe(duplex=False)


def _connect(files):
    """Makes paths or ends of pipes this process's standard input, output and error."""
    for number, file in enumerate(files):
        if isinstance(file, str):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
            os.dup2(opened, number)
            os.close(opened)
        else:
            os.dup2(file.fileno(), number)
            file.close()
    sys.stdin = open(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=False)


def _run(module, words, environment, files, cwd):
    _connect(files)
    gc.freeze()  # as conftest.py does, and as seldom
    gc.set_threshold(400_000)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if NETWORK in environment:
        with open(environment[NETWORK]) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {environment[NETWORK]}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
    path = [cwd, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = path + [entry for entry in sys.path if entry not in path]
    atexit._clear()  # what is the server's
    try:
        _run_program(module, words)
    except Exception:
        sys.excepthook(*sys.exc_info())  # as Python ends, which multiprocessing does not
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _run_program(module, words):
    if module == "-c":
        source, *words = words
        sys.argv[:] = [module, *words]
        exec(source, {"__name__": "__main__"})
        return
    sys.argv[:] = [module, *words]
    if module.endswith(".py"):
        sys.orig_argv[:] = [sys.executable, module, *words]
        sys.path[0] = os.path.dirname(os.path.abspath(module))
        runpy.run_path(module, run_name="__main__")
        return
    sys.orig_argv[:] = [sys.executable, "-m", module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
