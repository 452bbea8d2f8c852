"""The benchmark with the ceiling of a card: this trainer, Keras and the port, on one card and on all."""

import json
import pathlib

_BATCH, _CPU_BATCH = 1024, 64  # examples a step


def check(findings, settings):
    if settings.quick:
        findings.unchecked("the benchmark", "--quick; tests/bench has it on CPUs")
        return
    from gpu_checks import trials

    count = len(trials.gpus())
    if not count:
        findings.unchecked("the benchmark on GPUs", "there is none; on the CPU instead")
    most = 1 << max(1, count).bit_length() - 1  # shares the batch out evenly
    counts = sorted({1, most} if count else {1, 2})
    sides = ["ceiling/*", "keras/fit", "keras/MirroredStrategy 2", "port", *(
        f"tower_train/{n} tower*/{name}" for n in counts for name in ("float32/fixed", "float32/real", "bfloat16/fixed")
    )]  # fmt: skip
    out = pathlib.Path(settings.scratch, "benchmark")
    done = trials.command(
        "tower_train.benchmark", f"--systems={','.join(sides)}", f"--towers={','.join(map(str, counts))}", "--rounds=2",
        "--seconds=1", f"--batch_size={_BATCH if count else _CPU_BATCH}", "--dataset=generated",
        f"--data_dir={settings.data_dir}", f"--out={out}", seconds=settings.left() - 2,
    )  # fmt: skip
    rows = json.loads((out / "benchmark.json").read_text())["rows"]
    for row in rows:
        findings.measured(
            row["name"], examples_per_sec=row["per_sec"], spread=(row["high"] - row["low"]) / 2,
            of_the_ceiling=row["share"] or "not known", first_step_secs=row["first_step_secs"] or "-",
            **({"megabytes_of_a_gpu": row["card_bytes"] / 2**20} if row["card_bytes"] else {}),
        )  # fmt: skip
    findings.check(len(rows) >= len(counts) and "examples/sec" in done.stdout, "the benchmark ran", sides=len(rows))
    if count:
        towers = [row for row in rows if row["name"].startswith("tower_train/")]
        findings.check(
            all(row["card_bytes"] for row in towers), "the memory of the GPUs is known for each side of ours"
        )
