"""Two runs with the same seed: the same to the bit, with and without --deterministic?"""

import json
import pathlib
import statistics

_STEPS, _BATCH = 300, 128
_SECS_EACH = 18  # about what a run may take


def check(findings, settings):
    """Each run is a process of its own, as the algorithms that TensorFlow tries out may differ from one to another."""
    if settings.quick:
        findings.unchecked("two runs with the same seed", "--quick; tests/run has that on CPUs")
        return
    from gpu_checks import trials

    steps, rates = _STEPS if trials.gpus() else 20, {}
    for deterministic in (True, False):
        what = f"two runs of {steps} steps {'with' if deterministic else 'without'} --deterministic"
        if settings.left() < 2 * _SECS_EACH:
            findings.unchecked(what, "no time was left")
            continue
        with findings.attempt(what):
            runs = [_run(settings, trials, steps, deterministic, number) for number in range(2)]
            differing = [name for name in runs[0] if runs[0][name].tobytes() != runs[1][name].tobytes()]
            rates[deterministic] = statistics.median(
                _steps_per_sec(settings, deterministic, number) for number in range(2)
            )
            found = dict(steps_per_sec=rates[deterministic], variables=len(runs[0]), differing=len(differing))
            if deterministic or not differing:
                findings.check(not differing, f"{what} are the same to the bit", **found)
            else:
                findings.measured(f"{what} differ, as they may", **found)
    if len(rates) == 2:
        findings.measured("steps/s with --deterministic over those without", ratio=rates[True] / rates[False])
    if not trials.gpus():
        findings.unchecked("whether runs on GPUs repeat to the bit", "there is no GPU")


def _folder(deterministic, number) -> str:
    return f"{'deterministic' if deterministic else 'plain'}-{number}"


def _run(settings, trials, steps, deterministic, number) -> dict:
    import tensorflow as tf

    name = _folder(deterministic, number)
    words = trials.training_words(
        settings, name, max_steps=steps, batch_size=_BATCH, deterministic=deterministic, log_every_steps=steps // 10
    )
    trials.command("tower_train", *words, seconds=settings.left())
    reader = tf.train.load_checkpoint(f"{settings.scratch}/{name}/model.ckpt-{steps}")
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def _steps_per_sec(settings, deterministic, number) -> float:
    """By the log lines of the second half, when all algorithms are chosen."""
    lines = pathlib.Path(settings.scratch, _folder(deterministic, number), "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["examples_per_sec"] for line in lines[len(lines) // 2 :]) / _BATCH
