"""The ways to train and their speed: where the variables live, how gradients are averaged, each dtype."""

from gpu_checks import trials

_SECS_EACH, _QUICK_SECS = 2.0, 0.2
_BATCH, _CPU_BATCH = 512, 16  # of a tower
_SECS_FOR_ONE = 15  # building, warming up and measuring
_PART_MEGABYTES = 8000
_NOT_TIMED = "auto", "float64"


def variables_and_reduces(findings, settings):
    """Times each in float32; whether they train the same is for `towers` and `cards`."""
    kinds = {"cpu": {"variable_update": "cpu"}} | {
        f"mirrored, {reduce}": {"variable_update": "mirrored", "all_reduce": reduce}
        for reduce in trials.choices("all_reduce")
    }
    if (count := len(trials.gpus())) < 2:
        del kinds["mirrored, nccl"]
        findings.unchecked("mirrored, nccl", f"it needs two GPUs, and there {'is one' if count else 'is none'}")
    towers, where = trials.places(_PART_MEGABYTES)
    for name, kind in kinds.items():
        _measure(findings, settings, "convnet", f"convnet on {where}, {name}, float32", num_gpus=towers, **kind)


def dtypes(findings, settings):
    """Examples a second of one tower on one batch, so that nothing waits for input."""
    if not trials.gpus():
        findings.unchecked("speed of dtypes on a GPU", "there is none; on the CPU instead")
    names = ["float32"] if settings.quick else [each for each in trials.choices("dtype") if each not in _NOT_TIMED]
    for model in ("convnet",) if settings.quick else ("convnet", "resnet20"):
        for dtype in names:
            for rounds in (True, False) if dtype == "float32" and trials.gpus() else (True,):
                what = f"{model}, {dtype}{'' if rounds else ', no tf32'}, one tower"
                _measure(findings, settings, model, what, rounds, num_gpus=1, dtype=dtype)


def _measure(findings, settings, model, what, tensor_float_32=True, **options):
    if settings.left() < _SECS_FOR_ONE:
        findings.unchecked(what, "no time was left")
        return
    batch, seconds = _BATCH if trials.gpus() else _CPU_BATCH, _QUICK_SECS if settings.quick else _SECS_EACH
    with findings.attempt(what):
        workload, examples, flops = trials.fixed(model, batch, settings)
        rate = trials.examples_per_sec(workload, examples, seconds, tensor_float_32, batch_size=batch, **options)
        findings.measured(what, examples_of_a_tower=batch, examples_per_sec=rate, gigaflops=rate * flops / 1e9)
