"""The benchmark with the ceiling of a card: this trainer, Keras and the port, on one card and on all."""

import json
import pathlib

from gpu_checks import trials

_BATCH, _CPU_BATCH = 1024, 64  # examples a step
_SECS_A_SIDE, _CPU_SECS_A_SIDE = 12, 22  # about what a side takes to start and to be measured
_OTHER_SECS = 15  # and all else


def check(findings, settings):
    count = len(trials.gpus())
    if not count:
        findings.unchecked("the benchmark on GPUs", "there is none; on the CPU instead")
    most = trials.power_of_two(count) or 2
    towers = ["1 tower", *([f"{most} towers"] if most > 1 else [])]
    wanted = [  # the most telling first
        "ceiling/float32 matrix product", *(f"tower_train/{each}/float32" for each in towers), "keras/fit",
        "ceiling/bfloat16 matrix product", *(f"tower_train/{each}/bfloat16" for each in towers), "port",
        *(["keras/MirroredStrategy 2"] if most > 1 else []),
    ]  # fmt: skip
    chosen = wanted[: max(2, int((settings.left() - _OTHER_SECS) / (_SECS_A_SIDE if count else _CPU_SECS_A_SIDE)))]
    if len(chosen) < len(wanted):
        findings.unchecked(f"sides of the benchmark: {', '.join(wanted[len(chosen) :])}", "no time was left")
    out = pathlib.Path(settings.scratch, "benchmark")
    trials.command(
        "tower_train.benchmark", f"--systems={','.join(chosen)}", f"--towers={','.join(map(str, sorted({1, most})))}",
        "--rounds=2", "--seconds=1", f"--batch_size={_BATCH if count else _CPU_BATCH}", "--dataset=generated",
        f"--data_dir={settings.data_dir}", f"--out={out}", seconds=settings.left() - 2,
    )  # fmt: skip
    rows = json.loads((out / "benchmark.json").read_text())["parts"]["Training"]
    for row in rows:
        about = {"share": (row["share"] or {}).get("median"), "megabytes_of_a_gpu": (row["card_bytes"] or 0) / 2**20}
        about |= {"examples_per_sec": row["rate"]["median"], "first_step_secs": row["first_step_secs"]}
        findings.measured(row["side"]["name"], **{name: value for name, value in about.items() if value})
    findings.check(len(rows) == len(chosen), "the benchmark measured each side", sides=len(rows))
