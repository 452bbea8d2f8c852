"""Starting runs, in this process and in others, and reading what they leave behind."""

import fcntl
import itertools
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import forked
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from tower_train import Config, train
from tower_train.run import training
from tower_train.run_dir import checkpoint

v1 = tf.compat.v1
TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
ENDLESS = 1_000_000  # steps that no test waits for
WAIT_SECS = 120  # for another process, on a busy machine

# A run of tests/toy_workload.py on two towers; momentum gives it slot variables too.
TOY = dict(num_gpus=2, batch_size=8, optimizer="momentum", learning_rate=0.01, ema=0.9)
TOY |= dict(log_every_steps=5, save_every_steps=20, summary_every_steps=0, check_data=False, check_towers="never")
# The same examples a step on one tower, SGD, no moving averages: little more than half the cost.
SMALL = TOY | dict(num_gpus=1, batch_size=16, optimizer="sgd", ema=0.0)
EVERY_STEP = dict(log_every_steps=1, summary_every_steps=1, save_every_steps=5)


def train_toy(train_dir, at=None, workload="toy_workload", **options):
    """Trains the toy workload in this process.

    at: {step of this start: function to call after it}; one that returns True ends the run.
    """
    steps = itertools.count(1)

    def after_step(*_):
        return (at or {}).get(next(steps), lambda: None)() is True

    return train(workload, Config(train_dir=str(train_dir), **(TOY | options)), after_step=after_step)


def train_small(train_dir, at=None, **options):
    return train_toy(train_dir, at, **(SMALL | options))


def flags(**options):
    return [f"--{name}={value}" for name, value in options.items()]


def environment(*python_path):
    """The environment of other processes, which have oneDNN, as users' have: they find this package, and what else
    python_path names, in any directory."""
    paths = [str(ROOT), *map(str, python_path), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_ENABLE_ONEDNN_OPTS": "1"}


def command(module, *words, cwd=None, **variables):
    """Runs `python -m module words...`, `python -c source words...` or `python file.py words...` to its end."""
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        process = forked.Process(module, words, environment(TESTS) | variables, stdout.name, stderr.name, cwd)
        try:
            status = process.wait(WAIT_SECS)
        finally:
            process.kill()
        return subprocess.CompletedProcess([module, *words], status, stdout.read(), stderr.read())


def printed_command(line, cwd):
    """Runs `python -m module words...`, as a run prints it for the shell, to its end."""
    python, _, *words = shlex.split(line)
    assert pathlib.Path(shutil.which(python)).parent.samefile(pathlib.Path(sys.executable).parent)
    return command(*words, cwd=cwd)


def wait_for(condition):
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Program:
    """`python -m module words...` or `python -c source words...`, which ends with this context at the latest."""

    def __init__(self, module, *words, cwd=None, **variables):
        """Starts it in a directory, with further variables in its environment."""
        self._output = tempfile.NamedTemporaryFile("r", errors="replace")
        name = self._output.name
        self.process = forked.Process(module, words, environment(TESTS) | variables, name, name, cwd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._output.close()

    def output(self):
        self._output.seek(0)
        return self._output.read()

    def wait_until(self, condition):
        deadline = time.monotonic() + WAIT_SECS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.01)


class At(v1.train.SessionRunHook):
    """Calls functions with the SessionRunContext after steps of an Estimator: {step: function}."""

    def __init__(self, actions):
        self._actions, self._step = actions, 0

    def after_run(self, run_context, run_values):
        self._step += 1
        self._actions.get(self._step, lambda _: None)(run_context)


def stop_at(step):
    """A session hook that asks for the end of the training."""
    return At({step: lambda run_context: run_context.request_stop()})


def copy_after(step, train_dir, copy):
    """Copies a train_dir after a step, as somebody who kills the run then would find it: for `train_toy`."""
    return {step: lambda: shutil.copytree(train_dir, copy)}


def begun(monkeypatch):
    """The Trainings that begin their steps from now on: a list that fills."""
    found, calls = [], training.Training._calls
    monkeypatch.setattr(training.Training, "_calls", lambda self: found.append(self) or calls(self))
    return found


def toy_logits(variables, features, suffix="/ExponentialMovingAverage"):
    """The toy workload's network in numpy."""
    hidden = features @ variables[f"hidden/weights{suffix}"] + variables[f"hidden/biases{suffix}"]
    logits = np.maximum(hidden, 0) @ variables[f"softmax_linear/weights{suffix}"]
    return logits + variables[f"softmax_linear/biases{suffix}"]


def read_json(train_dir, name):
    return json.loads(pathlib.Path(train_dir, name).read_text())


def metrics(train_dir):
    records = [json.loads(line) for line in pathlib.Path(train_dir, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def metrics_but_times(train_dir):
    times = dict.fromkeys(("examples_per_sec", "sec_per_batch", "input_share"))
    return [record | times for record in metrics(train_dir)]


def logged_step(train_dir):
    """The last step in a metrics.jsonl that is being written to; 0 where there is none."""
    path = pathlib.Path(train_dir, "metrics.jsonl")
    whole_lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(whole_lines[-1])["step"] if whole_lines else 0


def saved_step(train_dir):
    """The step of the newest checkpoint; 0 where there is none."""
    newest = tf.train.latest_checkpoint(str(train_dir))
    return int(newest.rpartition("-")[2]) if newest else 0


def saved_steps(train_dir):
    return sorted(int(path.stem.rpartition("-")[2]) for path in pathlib.Path(train_dir).glob("model.ckpt-*.index"))


def variables(train_dir, step=None):
    """{name: value} in the checkpoint of a step, or in the newest."""
    path = f"{train_dir}/model.ckpt-{step}" if step else tf.train.latest_checkpoint(str(train_dir))
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_identical(variables, expected):
    """The same variables, to the last bit."""
    assert variables.keys() == expected.keys()
    for name, value in expected.items():
        assert np.asarray(variables[name]).tobytes() == np.asarray(value).tobytes(), name


def assert_close(variables, expected):
    """The same variables, but for rounding in float64."""
    assert variables.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(variables[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def events(folder):
    """Reads a folder's event files as TensorBoard does."""
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return accumulator.Reload()


def contents(folder):
    """{path: bytes} of all files in a folder, but for the lock, to see that nothing was changed."""
    return {p: p.read_bytes() for p in pathlib.Path(folder).rglob("*") if p.is_file() and p.name != ".lock"}


def save_checkpoints(folder, *steps, keep=0):
    """Saves checkpoints of three variables, the same at every step but for global_step; returns the last one's path."""
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.get_variable("global_step", [], tf.int64, v1.zeros_initializer())
        layers = [v1.get_variable(f"layer{i}/weights", initializer=np.arange(300.0, dtype="f") * i) for i in range(2)]
        checkpoints = checkpoint.Checkpoints(folder, [step, *layers], keep)
        session.run(v1.global_variables_initializer())
        for number in steps:
            session.run(step.assign(number))
            path = checkpoints.save(session, number)
    return path


def once(tmp_path_factory, name, make):
    """A folder of this test run that make(folder) has filled, in whichever of pytest-xdist's processes came first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    made = folder.with_name(f"{name}.made")
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir()  # fails where another process began, and failed
            make(folder)
            made.touch()
    return folder
