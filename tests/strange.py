"""Strange input, drawn at random: texts, JSON, files, command lines, environments of a cluster."""

import json
import os
import shutil

import jobs

from tower_train.config import Config, EvaluateOptions, ExportOptions, PredictOptions, RecipeOptions
from tower_train.options import command_line, kind_of

NUMBERS = (
    *"0 1 -1 2 3 7 0.5 1e38 -1e38 1e300 1e400 1e-320 nan inf -inf 0x10 1_0 1e3 2147483647 2147483648".split(),
    *"4294967296 9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551616".split(),
    "1" * 400, "1" * 5000, "\u0967", "\u00b2",
)  # fmt: skip
TEXTS = (
    *" |true|None|1,2|1,,2|0,0|3,1,2|0:1,1:0|0:nan|0:1e400|a:b|::|%s|{}|\n|a\nb|\udcff|\u00e9|\u202e".split("|"),
    *"\x1b[31m|\x01|--seed=1|=|'|../..|n[1-|n[1-99999999]|n]1[|n[2-1]|2(x|9999(x9999)".split("|"), "", "x" * 10_000,
    *NUMBERS,
)  # fmt: skip
PATHS = (*"|.|/dev/null|/proc/self/no|missing/dir|file|dir|fifo|loop|gs://b/r|\udcff|a\nb".split("|"), "x" * 300)
# What some options have instead of texts.
TEXTS_OF = dict.fromkeys(("train_dir", "data_dir", "export_dir"), PATHS) | {
    "workload": (
        *"json|os:path|toy_workload:|:|..|toy_workload:CLASSES|toy_workload:a.b|a b|cifar10:X".split("|"), "a" * 5000,
    ),
    "worker_hosts": (
        *"a:1|a:1,b:2|a:1,|localhost:0|localhost:99999|a:b|[::1]:80,b:2|a:1,a:1|,|a:1,b:2,c:3".split("|"),
    ),
}  # fmt: skip
WORDS = "stray", "--", "-", "--=", "--no", "--flagfile=flags", "--nosuch=1", "\udcff", "---seed=1", "-seed"
VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 0.5, 1e308, float("nan"), float("-inf"), "", "x", "0", "a\nb",
    "../../etc", "x" * 5000, [], {}, [[]], [1, "a", None],
)  # fmt: skip
COMMANDS = {
    "tower_train": ((Config, RecipeOptions), jobs.TOY | dict(
        workload="toy_workload", train_dir="run", max_steps=3, start_timeout_secs=2)),
    "tower_train.evaluate": ((EvaluateOptions,), {}),
    "tower_train.export": ((ExportOptions,), dict(export_dir="exported")),
    "tower_train.predict": ((PredictOptions,), {}),
}  # fmt: skip
FIND_TASK = "from tower_train.cluster.task import find_task as f; " + (
    "from tower_train.options import command_line; command_line.run(lambda _: f(None, None) and 0)"
)
TF_CONFIG = {"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}
SLURM = dict(
    SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_TASKS_PER_NODE="2(x2)",
    SLURMD_NODENAME="n1",
)  # fmt: skip


def text(draw, like):
    """A text with some characters changed, added or left out; or another altogether."""
    if draw.random() < 0.4:
        return draw.choice(TEXTS)
    characters = list(like)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(characters) + 1)
        characters[place : place + draw.randrange(2)] = draw.choice(["", *'[]-,()"{90', "\udc80", "\u0660"])
    return "".join(characters)


def json_of(draw, value):
    """JSON in which one value, or some character, is another, or whose brackets do not end."""
    how = draw.random()
    if how < 0.75:
        return json.dumps(_replaced(draw, value))
    if how < 0.8:
        return draw.choice(["[", '{"a":', "[["]) * draw.choice([1, 5000, 20_000])
    return text(draw, json.dumps(value))


def _replaced(draw, value):
    """The value, of which one part, at any depth, is another."""
    if not value or not isinstance(value, dict | list) or draw.random() < 0.15:
        return draw.choice([*VALUES, [value], {"a": value}, str(value)])
    copy, key = value.copy(), draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if draw.random() < 0.1:
        del copy[key]
    else:
        copy[key] = _replaced(draw, value[key])
    return copy


def change(draw, path, kinds=("bytes", "cut", "random", "empty", "gone", "directory", "fifo", "loop")):
    """Changes a file; returns what was done to it."""
    content = path.read_bytes()
    is_json = path.suffix in (".json", ".jsonl") and "fifo" in kinds
    kind = "json" if is_json and draw.random() < 0.5 else draw.choice(kinds)
    path.unlink()
    if kind == "json":
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        place = draw.randrange(len(lines))
        lines[place] = json_of(draw, json.loads(lines[place]))
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        return f"json {lines[place]}"
    if kind in ("bytes", "cut", "random", "empty"):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4) if content else 0):
            changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        cut = content[: draw.randrange(max(1, len(content)))]
        path.write_bytes({"cut": cut, "random": draw.randbytes(50), "empty": b"", "bytes": changed}[kind])
    elif kind != "gone":
        {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path.name)}[kind]()
    return kind


# Starts: (module, words, environment, what is strange beside these), of a process in a folder, near a run's copy there.


def command_line_start(draw, folder):
    """A command with a few strange options; the rest is as it should be."""
    module = draw.choices(list(COMMANDS), [12, 2, 1, 2])[0]
    classes, base = COMMANDS[module]
    (folder / "file").write_text("text")
    (folder / "dir").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    flags = draw.choice([draw.randbytes(draw.randrange(40)), b"--seed=x\n\n#\n--flagfile=flags"])
    (folder / "flags").write_bytes(flags)
    fields = command_line.fields_of(*classes)
    options = dict(train_dir="run") | base
    for _ in range(draw.randint(1, 3)):
        field = draw.choice(list(fields.values()))
        options[field.name] = _option_text(draw, field)
    words = jobs.flags(**options)
    if draw.random() < 0.15:
        words.insert(draw.randrange(len(words)), draw.choice(WORDS))
    return module, words, {}, ""


def _option_text(draw, field):
    kind, allowed = kind_of(field), field.metadata["allowed"]
    if isinstance(allowed, tuple) and draw.random() < 0.7:
        return draw.choice(allowed)
    if field.name in TEXTS_OF:
        return draw.choice(TEXTS_OF[field.name])
    if draw.random() < 0.3:
        return draw.choice(("true", "false") if kind is bool else ("0", "1", "2", "3", "0.5"))
    return draw.choice(NUMBERS if kind in (int, float) and draw.random() < 0.85 else TEXTS)


def environment_start(draw, folder):
    """Variables that a scheduler might set; the process only looks for its place."""
    if draw.random() < 0.5:
        environment = {"TF_CONFIG": json_of(draw, TF_CONFIG)}
    else:
        changed = {name: text(draw, SLURM[name]) for name in draw.sample(list(SLURM), draw.randint(1, 2))}
        environment = SLURM | changed
        if draw.random() < 0.2:
            del environment[draw.choice(list(environment))]
    return "-c", [FIND_TASK], {name: value.replace("\0", "") for name, value in environment.items()}, ""


def run_file_start(draw, folder):
    """A command on a run of which some file is not what was written."""
    files = [each for each in sorted((folder / "run").rglob("*")) if each.is_file()]
    done = [f"{path.name}: {change(draw, path)}" for path in draw.sample(files, draw.randint(1, 2))]
    toy = jobs.TOY | dict(workload="toy_workload", max_steps=44, keep_best="true", eval_every_steps=20)
    module, words = draw.choice([
        ("tower_train", jobs.flags(train_dir="run", **toy)),
        ("tower_train.evaluate", ["--train_dir=run"]),
        ("tower_train.evaluate", ["--train_dir=run", "--best"]),
        ("tower_train.export", ["--train_dir=run"]),
    ])  # fmt: skip
    return module, words, {}, "; ".join(done)


STARTS = {
    "command line": command_line_start, "environment": environment_start, "file of a run": run_file_start,
}  # fmt: skip


def start(draw, what, folder, run_dir):
    """Makes a start of a kind in a folder, into which the run is copied."""
    folder.mkdir()
    shutil.copytree(run_dir, folder / "run")
    return STARTS[what](draw, folder)
