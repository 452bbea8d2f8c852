"""Strange input, drawn at random: command lines, environments of a cluster, files of a run."""

import dataclasses
import json
import os
import shutil

import jobs

from tower_train import __main__, evaluate, export, predict
from tower_train.cluster.task import find_task
from tower_train.config import Config, EvaluateOptions, ExportOptions, PredictOptions, RecipeOptions
from tower_train.options import command_line, kind_of

NUMBERS = (
    *"0 1 -1 2 3 7 0.5 1e38 -1e38 1e300 1e400 1e-320 nan inf -inf 0x10 1_0 1e3 2147483647 2147483648".split(),
    *"4294967296 9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551616".split(),
    "1" * 400, "1" * 5000, "\u0967", "\u00b2",
)  # fmt: skip
TEXTS = (
    "", " ", "true", "None", "1,2", "1,,2", "0,0", "3,1,2", "0:1,1:0", "0:nan", "0:1e400", "a:b", "::", "%s", "{}",
    "\n", "a\nb", "\udcff", "\u00e9", "\u202e", "\x1b[31m", "\x01", "x" * 10_000, "--seed=1", "=", "'", "../..",
)  # fmt: skip
PATHS = (
    "", ".", "/dev/null", "/proc/self/no", "missing/dir", "file", "dir", "fifo", "loop", "gs://b/r", "\udcff",
    "a\nb", "x" * 300,
)  # fmt: skip
WORKLOADS = (
    "json", "os:path", "toy_workload:", ":", "..", "toy_workload:CLASSES", "a" * 5000, "toy_workload:a.b", "a b",
    "cifar10:X",
)  # fmt: skip
HOSTS = (
    "a:1", "a:1,b:2", "a:1,", "localhost:0", "localhost:99999", "a:b", "[::1]:80,b:2", "a:1,a:1", ",", "a:1,b:2,c:3",
)  # fmt: skip
ALLOWED_PATHS = ("train_dir", "data_dir", "export_dir")
# A base that ends soon.
BASE = jobs.TOY | dict(workload="toy_workload", train_dir="run", max_steps=3, start_timeout_secs=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A command's main, the words of its command line, and variables of its environment."""

    main: object
    words: tuple
    environment: dict = dataclasses.field(default_factory=dict)
    about: str = ""

    def __str__(self):
        main = getattr(self.main, "__module__", self.main)
        words = " ".join(word if len(word) < 300 else f"{word[:99]}... ({len(word)} characters)" for word in self.words)
        return f"{main} {words!a} {str(self.environment)[:999]!a} {self.about}"


def command_line_case(draw, folder, run_dir):
    """A command with some strange options, of a few at a time; the rest is as it should be."""
    main, classes, base = draw.choices(
        [
            (__main__.main, (Config, RecipeOptions), BASE),
            (evaluate.main, (EvaluateOptions,), dict(train_dir=run_dir)),
            (export.main, (ExportOptions,), dict(train_dir=run_dir, export_dir="exported")),
            (predict.main, (PredictOptions,), dict(train_dir=run_dir)),
        ],
        [12, 2, 1, 2],
    )[0]
    _put_files(folder)
    fields = command_line.fields_of(*classes)
    options = {name: str(value) for name, value in base.items()}
    for _ in range(draw.randint(1, 3)):
        field = draw.choice(list(fields.values()))
        options[field.name] = _option_text(draw, field)
    words = [f"--{name}={value}" for name, value in options.items()]
    if draw.random() < 0.15:
        words.insert(
            draw.randrange(len(words)),
            draw.choice(
                ["stray", "--", "-", "--=", "--no", "--flagfile=flags", "--nosuch=1", "\udcff", "---seed=1", "-seed"]
            ),
        )
    (folder / "flags").write_bytes(
        draw.randbytes(draw.randrange(40)) if draw.random() < 0.5 else b"--seed=x\n\n#\n--flagfile=flags"
    )
    return Case(main, tuple(words))


def _option_text(draw, field):
    kind, allowed = kind_of(field), field.metadata["allowed"]
    if isinstance(allowed, tuple) and draw.random() < 0.7:
        return draw.choice(allowed)
    if field.name == "workload":
        return draw.choice(WORKLOADS)
    if field.name == "worker_hosts":
        return draw.choice(HOSTS)
    if field.name in ALLOWED_PATHS:
        return draw.choice(PATHS)
    if draw.random() < 0.3:
        return draw.choice(("true", "false") if kind is bool else ("0", "1", "2", "3", "0.5"))
    if kind in (int, float) and draw.random() < 0.85:
        return draw.choice(NUMBERS)
    return draw.choice(TEXTS + NUMBERS)


def _put_files(folder):
    (folder / "file").write_text("text")
    (folder / "dir").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")


def environment_case(draw, folder, run_dir):
    """Variables that a scheduler might set; the process only looks for its place."""
    if draw.random() < 0.5:
        environment = {"TF_CONFIG": _strange_json(draw, {
            "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 1}
        })}  # fmt: skip
    else:
        environment = dict(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NODELIST="n[1-2]",
                           SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURMD_NODENAME="n1")  # fmt: skip
        for _ in range(draw.randint(1, 2)):
            name = draw.choice(list(environment))
            environment[name] = _strange_text(draw, environment[name])
        if draw.random() < 0.2:
            del environment[draw.choice(list(environment))]
    environment = {name: value.replace("\0", "") for name, value in environment.items()}
    return Case(_look_for_task, (), environment)


def _look_for_task(argv):
    find_task(None, None)
    return 0


def run_files_case(draw, folder, run_dir):
    """A command on a run of which some file is not what was written."""
    copy = folder / "run"
    shutil.copytree(run_dir, copy)
    files = [each for each in sorted(copy.rglob("*")) if each.is_file()]
    done = [f"{path.name}: {_change(draw, path)}" for path in draw.sample(files, draw.randint(1, 2))]
    main, words = draw.choice([
        (__main__.main, jobs.toy_flags("run", max_steps=44, keep_best="true", eval_every_steps=20)),
        (evaluate.main, ["--train_dir=run"]),
        (evaluate.main, ["--train_dir=run", "--best"]),
        (export.main, ["--train_dir=run"]),
    ])  # fmt: skip
    return Case(main, tuple(words), about="; ".join(done))


def _change(draw, path):
    """Changes a file; returns what was done to it."""
    is_json = path.suffix == ".json" or path.suffix == ".jsonl"
    kind = draw.choice(
        ["bytes", "cut", "random", "gone", "directory", "fifo", "loop", "empty"] + ["json"] * 8 * is_json
    )
    content = path.read_bytes()
    if kind in ("gone", "directory", "fifo", "loop"):
        path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "json":
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        place = draw.randrange(len(lines))
        lines[place] = _strange_json(draw, json.loads(lines[place]))
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        return f"json {lines[place]}"
    elif kind != "gone":
        cut = content[: draw.randrange(len(content) + 1)]
        changed = {"cut": cut, "random": draw.randbytes(50), "empty": b"", "bytes": _flipped(draw, content)}
        path.write_bytes(changed[kind])
    return kind


def _flipped(draw, content):
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _strange_json(draw, value):
    """JSON in which one value, or some character, is another."""
    how = draw.random()
    if how < 0.75:
        return json.dumps(_replaced(draw, value))
    if how < 0.8:
        return draw.choice(["[", '{"a":', "[["]) * draw.choice([1, 5000, 100_000 // 5])
    return _strange_text(draw, json.dumps(value))


def _replaced(draw, value):
    """The value, of which one part, at any depth, is another."""
    if value and isinstance(value, (dict, list)) and draw.random() < 0.85:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy = value.copy()
        if draw.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _replaced(draw, value[key])
        return copy
    return draw.choice([
        None, True, False, 0, -1, 1, 2**31, 2**63, 0.5, 1e308, float("nan"), float("-inf"), "", "x", "0",
        "a\nb", "../../etc", "x" * 5000, [], {}, [[]], [value], {"a": value}, [1, "a", None],
        str(value),
    ])  # fmt: skip


def _strange_text(draw, text):
    """A text with some characters changed, added or left out; or another altogether."""
    if draw.random() < 0.4:
        return draw.choice(
            TEXTS
            + NUMBERS
            + ("n[1-", "n[1-99999999]", "n]1[", "n[a-b]", "n[2-1]", "[1]", "n[1][2]", "2(x", "9999(x9999)")
        )
    characters = list(text)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(characters) + 1)
        characters[place : place + draw.randrange(2)] = draw.choice(
            ["", "[", "]", "-", ",", "(", ")", '"', "{", "9", "\udc80", "\u0660", "0"]
        )
    return "".join(characters)


KINDS = {"command_line": command_line_case, "environment": environment_case, "run_files": run_files_case}
