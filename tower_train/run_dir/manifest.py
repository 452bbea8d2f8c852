"""run.json: the workload, data, options and versions of a run's last start, and whether the run may be resumed."""

import dataclasses
import datetime
import hashlib
import inspect
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tower_train import __version__, errors
from tower_train.config import Config
from tower_train.console import one_line
from tower_train.examples import Examples
from tower_train.files import is_remote
from tower_train.options import Options
from tower_train.workload import Workload, source_file


def describe(
    workload: Workload, examples: Examples, options: Mapping[str, Any], global_batch: int, devices: Sequence[str]
) -> dict:
    """Returns the content of run.json for this start, without facts about its graph. options: the trainer's, by name;
    `workload` is an import path, or None if it has none."""
    data_dir = options["data_dir"]
    if data_dir and not is_remote(data_dir):
        data_dir = os.path.abspath(os.path.expanduser(data_dir))  # found from any directory
    return {
        "workload": workload.name,
        "workload_file": source_file(options["workload"]),
        "dataset": examples.dataset,
        "data": {
            "name": examples.name,
            "num_examples": examples.num_examples,
            "fingerprint": examples.fingerprint,
            "notice": examples.notice,
            "class_names": list(examples.class_names),
            "class_counts": examples.class_counts,
        },
        "config": {**options, "data_dir": data_dir},
        "workload_options": dataclasses.asdict(workload.options) if workload.options else {},
        "global_batch": global_batch,
        "devices": list(devices),
        "versions": {
            "tower_train": __version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "started": datetime.datetime.now().isoformat(timespec="milliseconds"),
    }


_MOST_LETTERS = 200  # of a value in a line
# Options whose values may differ between the workers of a cluster.
_PER_WORKER = {
    "task_index",
    "worker_hosts",
    "train_dir",
    "data_dir",
    "override",
    "device",
    "gpus",
    "log_device_placement",
    "wait_for_workers",
}


def same_everywhere(now: dict, workload: Workload) -> dict:
    """Returns {name: value} of everything that workers of a cluster must have in common, from run.json."""
    facts = {"workload": now["workload"], "code": _code_fingerprint(workload)}
    facts |= {f"data {name}": now["data"][name] for name in ("name", "num_examples", "fingerprint")}
    facts |= {f"--{name}": value for name, value in now["config"].items() if name not in _PER_WORKER}
    facts |= {f"--{name}": value for name, value in now["workload_options"].items()}
    return facts | {f"{name} version": now["versions"][name] for name in ("tower_train", "tensorflow")}


def _code_fingerprint(workload: Workload) -> str:
    """Returns a digest of this package's files and of the package or file of the workload's network."""
    function = inspect.unwrap(workload.inference or workload.inference_for)
    module = inspect.getmodule(getattr(function, "func", function))
    roots = [pathlib.Path(__file__).parents[1]]
    if file := getattr(module, "__file__", None):
        roots.append(pathlib.Path(file).parent if module.__package__ else pathlib.Path(file))
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def check_workload(path: pathlib.Path, before: dict, workload: Workload, override: bool) -> None:
    """Raises RunError for a run of another workload. before: run.json of the last start, which may be empty."""
    name = before.get("workload", workload.name)
    if name != workload.name and not override:
        module = before.get("config", {}).get("workload")
        raise errors.RunError(
            f"--train_dir={path} holds another run: workload was {name}, now {workload.name}. Give another directory, "
            f"{f'--workload={module}' if module else 'that workload'}, or --override to go on all the same."
        )


def check_resume(
    path: pathlib.Path, before: dict, now: dict, override: bool, workload_options: Options | None = None
) -> list[str]:
    """Compares the run.json of the last start, which is empty if there was none, with this start's. Returns lines about
    differences that do not matter, or were overridden; RunError that lists the others."""
    refused, changed = [], []
    for rule, name, old, new in _compared(before, now, workload_options) if before else ():
        if old != new:
            was, now_is = ("not given" if value is None else str(value)[:_MOST_LETTERS] for value in (old, new))
            (refused if rule == "same" else changed).append(f"{name} was {was}, now {now_is}")
    if refused and not override:
        size = before.get("global_batch", now["global_batch"])  # which another number of towers can have too
        instead = f" (--global_batch_size={size} instead of --batch_size, and a number of towers that divides it)"
        same_batch = instead if size != now["global_batch"] else ""
        raise errors.RunError(
            f"--train_dir={path} holds another run: {'; '.join(refused)}. "
            f"Give another directory, the same options{same_batch}, or --override to go on all the same."
        )
    return [one_line(f"Changed since the last start: {difference}.") for difference in refused + changed]


def _compared(before: dict, now: dict, workload_options: Options | None):
    """Yields (rule, name, value before, value now) of what the last start noted."""
    for name, old in {key: before[key] for key in ("workload", "global_batch") if key in before}.items():
        yield "same", name.replace("_", " "), old, now[name]
    for part, options in (("config", Config), ("workload_options", workload_options)):
        for field in dataclasses.fields(options) if options else ():
            rule, old = field.metadata["resume"], before.get(part, {})
            was = old.get(field.name, field.default)  # an option that did not exist had no effect, as by default
            is_open = field.name not in old and was == "auto"  # its value now is what this start has chosen
            if rule != "free" and old and not is_open:
                yield rule, f"--{field.name}", was, now[part][field.name]
    for name, old in before["data"].items():  # after the options that change them
        if name in ("name", "fingerprint"):
            yield "same", f"data {name}", old, now["data"][name]
    for name, old in before.get("versions", {}).items():
        yield "note", f"{name} version", old, now["versions"].get(name)
