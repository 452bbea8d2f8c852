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
    wanted = _sides(most)
    secs_a_side = _SECS_A_SIDE if count else _CPU_SECS_A_SIDE
    chosen = wanted[: max(2, int((settings.left() - _OTHER_SECS) / secs_a_side))]
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
        rate = row["rate"]
        further = {"share": (row["share"] or {}).get("median"), "megabytes_of_a_gpu": (row["card_bytes"] or 0) / 2**20}
        findings.measured(
            row["side"]["name"], examples_per_sec=rate["median"], spread=(rate["high"] - rate["low"]) / 2,
            first_step_secs=row["first_step_secs"], **{name: value for name, value in further.items() if value},
        )  # fmt: skip
    findings.check(len(rows) == len(chosen), "the benchmark measured each side", sides=len(rows))
    if count:
        ours = [row["card_bytes"] for row in rows if row["side"]["name"].startswith("tower_train/")]
        findings.check(all(ours), "the memory of the GPUs is known for each side of ours")


def _sides(most: int) -> list[str]:
    """Returns the names of the sides, the most telling first; `most` towers are all cards."""
    towers = f"{most} tower{'s' * (most > 1)}"
    found = [
        "ceiling/float32 matrix product", "tower_train/1 tower/float32", f"tower_train/{towers}/float32", "keras/fit",
        "ceiling/bfloat16 matrix product", "tower_train/1 tower/bfloat16", f"tower_train/{towers}/bfloat16", "port",
        *(["keras/MirroredStrategy 2"] if most > 1 else []),
    ]  # fmt: skip
    return list(dict.fromkeys(found))
